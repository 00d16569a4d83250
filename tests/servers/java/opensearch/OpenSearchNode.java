import org.codelibs.opensearch.runner.OpenSearchRunner;

/**
 * One node of OpenSearch on a port that is told to it.
 *
 * <p>The runner's own main looks for a free port itself, below 9300, and so would come up on
 * another one than before where something else has come by its port.
 */
public final class OpenSearchNode {
    /** Arguments: directory of the data, directory of opensearch.yml, HTTP port. */
    public static void main(String[] args) throws Exception {
        Runner runner = new Runner();
        runner.onBuild((number, settings) -> settings.put("http.port", args[2]));
        runner.build(
                "-basePath", args[0],
                "-confPath", args[1],
                "-numOfNode", "1",
                "-clusterName", "steward-tests",
                "-printOnFailure",
                "-moduleTypes", runner.modules());
        while (!runner.isClosed()) {
            Thread.sleep(5000);
        }
    }

    private static final class Runner extends OpenSearchRunner {
        /** What it loads; of the product's analysis our own form, where there is one. */
        String modules() {
            String all = String.join(",", MODULE_TYPES);
            try {
                Class<?> ours = Class.forName("WithoutThai");
                return all.replace(ours.getSuperclass().getName(), ours.getName());
            } catch (ClassNotFoundException e) {
                return all; // this version runs on a Java that has everything
            }
        }
    }
}
