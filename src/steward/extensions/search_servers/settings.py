"""Settings of archive sinks on Elasticsearch and OpenSearch."""

from steward.archive.settings import SinkSettings
from steward.core.section import TlsReference


class SearchSinkSettings(SinkSettings, frozen=True, kw_only=True):
    """[archive.sink.NAME] with kind = "elasticsearch" or "opensearch": a search server.

    Secrets are read from files, which only Steward should be able to read.

    Attributes:
        urls: The server's nodes: ``https://search1:9200``.
        index: Prefix of the monthly indices' names, and the alias over all of them.
        user: User name for basic authentication; with ``password_file``.
        password_file: A file that holds the user's password or, if ``user`` is empty, an API key
            (``id:key`` or its base64).
        tls: Name of a table ``[tls.NAME]`` for ``https``; if empty, the system's CA certificates.
    """

    urls: tuple[str, ...] = ()
    index: str = "steward-jobs"
    user: str = ""
    password_file: str = ""
    tls: TlsReference = None

    @property
    def ca_file(self) -> str:
        """CA certificates that verify the server's; "" for the system's."""
        return self.tls.ca_file if self.tls else ""

    @property
    def certificate_file(self) -> str:
        """Client certificate; "" for none."""
        return self.tls.certificate_file if self.tls else ""

    @property
    def key_file(self) -> str:
        """Private key of that certificate."""
        return self.tls.key_file if self.tls else ""


class ElasticsearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="elasticsearch"):
    """[archive.sink.NAME] with kind = "elasticsearch": Elasticsearch 8 or 9."""


class OpenSearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="opensearch"):
    """[archive.sink.NAME] with kind = "opensearch": OpenSearch 2 or 3."""
