"""Settings of archive sinks on Elasticsearch and OpenSearch."""

from steward.archive.settings import SinkSettings
from steward.core.section import TlsReference


class SearchSinkSettings(SinkSettings, frozen=True, kw_only=True):
    """[archive.sink.NAME] with kind = "elasticsearch" or "opensearch": a search server.

    Secrets are read from files, which only Steward should be able to read.

    Attributes:
        urls: The server's nodes: ``https://search1:9200``.
        index: Prefix of the monthly indices' names, and the alias over all of them.
        environments: Whether environments are sent, too.
        user: User name for basic authentication; with ``password_file``.
        password_file: A file that holds the password.
        api_key_file: A file that holds an API key (``id:key`` or its base64), in place of a user.
        tls: Name of a table ``[tls.NAME]`` for ``https``; if empty, the system's CA certificates.
        shards: Primary shards of each monthly index.
        replicas: Copies of each shard.
        batch_bytes: Bytes read and sent at once; a request holds up to 2 MiB of them.
        timeout_s: Time limit of one request, in seconds.
    """

    urls: tuple[str, ...] = ()
    index: str = "steward-jobs"
    environments: bool = True
    user: str = ""
    password_file: str = ""
    api_key_file: str = ""
    tls: TlsReference = None
    shards: int = 1
    replicas: int = 1
    batch_bytes: int = 8 * 1024**2
    timeout_s: float = 60.0

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
