"""Elasticsearch and OpenSearch archive sinks: scripts as documents, indexed by month.

``destination`` is the sink: it sends ``documents`` in ``bulk`` requests, after installing the
``index_template``. ``search`` finds scripts in a sink. Both use ``client``.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.extensions.search_servers.client import SearchClient
    from steward.extensions.search_servers.destination import SINK_KIND
    from steward.extensions.search_servers.index_template import check_product
    from steward.extensions.search_servers.settings import (
        ElasticsearchSinkSettings,
        OpenSearchSinkSettings,
        SearchSinkSettings,
    )
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        destination=("SINK_KIND",),
        client=("SearchClient",),
        index_template=("check_product",),
        settings=(
            "ElasticsearchSinkSettings",
            "OpenSearchSinkSettings",
            "SearchSinkSettings",
        ),
    )

__all__ = [
    "SINK_KIND",
    "ElasticsearchSinkSettings",
    "OpenSearchSinkSettings",
    "SearchClient",
    "SearchSinkSettings",
    "check_product",
]
