import java.lang.reflect.Method;
import java.nio.file.Path;
import java.util.Map;
import java.util.Set;
import org.elasticsearch.Build;
import org.elasticsearch.cluster.service.ClusterService;
import org.elasticsearch.common.logging.LogConfigurator;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.node.InternalSettingsPreparer;
import org.elasticsearch.node.Node;
import org.elasticsearch.plugins.PluginBundle;
import org.elasticsearch.plugins.PluginsLoader;
import org.elasticsearch.rest.RestController;
import org.elasticsearch.rest.RestHandler;
import org.elasticsearch.rest.RestRequest;
import org.elasticsearch.rest.RestResponse;
import org.elasticsearch.rest.RestStatus;

/**
 * One node of Elasticsearch 8 or 9, made from the jars of the server and of its HTTP alone.
 *
 * <p>The product's launcher is not published as a jar, and neither is the module that answers at
 * the root, which every client asks first.
 */
public final class ElasticsearchNode {
    private static final String NAME = "node-1";
    private static final String GREETING = """
            {"name": "%s", "cluster_name": "%s", "cluster_uuid": "%s",
             "version": {"number": "%s", "build_flavor": "default", "build_type": "tar",
              "build_hash": "%s", "build_date": "%s", "build_snapshot": false,
              "lucene_version": "%s", "minimum_wire_compatibility_version": "%s",
              "minimum_index_compatibility_version": "%s"},
             "tagline": "You Know, for Search"}
            """;

    /** Argument: the directory of elasticsearch.yml and log4j2.properties. */
    public static void main(String[] args) throws Exception {
        Path config = Path.of(args[0]);
        String home = System.getProperty("es.path.home");
        Settings places = Settings.builder().put("path.home", home).build();
        // Logging comes first: what reads YAML wants a logger, and there is one only then.
        LogConfigurator.setNodeName(NAME);
        LogConfigurator.configure(new Environment(places, config), true);
        Environment environment =
                InternalSettingsPreparer.prepareEnvironment(places, Map.of(), config, () -> NAME);
        PluginsLoader plugins =
                PluginsLoader.createPluginsLoader(
                        bundles("loadModulesBundles", Path.of(home, "modules")),
                        bundles("loadPluginsBundles", Path.of(home, "plugins")),
                        Map.of());
        Node node = new Node(environment, plugins);
        RestController controller = node.injector().getInstance(RestController.class);
        ClusterService cluster = node.injector().getInstance(ClusterService.class);
        RestHandler root =
                (request, channel, client) ->
                        channel.sendResponse(
                                new RestResponse(
                                        RestStatus.OK, "application/json", greeting(cluster)));
        controller.registerHandler(new RestHandler.Route(RestRequest.Method.GET, "/"), root);
        controller.registerHandler(new RestHandler.Route(RestRequest.Method.HEAD, "/"), root);
        node.start();
        Thread.currentThread().join();
    }

    /** The loaders of 9 take one more argument, which is false for the ordinary product. */
    @SuppressWarnings("unchecked")
    private static Set<PluginBundle> bundles(String loader, Path directory) throws Exception {
        for (Method method : PluginsLoader.class.getMethods()) {
            if (method.getName().equals(loader)) {
                return (Set<PluginBundle>)
                        (method.getParameterCount() == 1
                                ? method.invoke(null, directory)
                                : method.invoke(null, directory, false));
            }
        }
        throw new NoSuchMethodException(loader);
    }

    private static String greeting(ClusterService cluster) {
        Build build = Build.current();
        return GREETING.formatted(
                NAME,
                cluster.getClusterName().value(),
                cluster.state().metadata().clusterUUID(),
                build.version(),
                build.hash(),
                build.date(),
                org.apache.lucene.util.Version.LATEST,
                build.minWireCompatVersion(),
                build.minIndexCompatVersion());
    }
}
