"""The settings of sinks on Elasticsearch and OpenSearch."""

from steward.archive.settings import SinkSettings


class SearchSinkSettings(SinkSettings, frozen=True, kw_only=True):
    """[archive.sink.NAME] with kind = "elasticsearch" or "opensearch": a search server.

    What is kept of secrets here are names of files, which Steward alone should be able to read.

    Attributes:
        urls: Its nodes: ``https://search1:9200``.
        index: Begin of the names of the monthly indices, and the alias over all of them.
        environments: Whether environments are sent, too.
        user: For basic authentication; with ``password_file``.
        password_file: A file that holds the password.
        api_key_file: A file that holds an API key (``id:key`` or its base64), in place of a user.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        certificate_file: Our own certificate, where the server asks for one.
        key_file: The key of that certificate.
        shards: Primary shards of each monthly index.
        replicas: Copies of each shard.
        batch_bytes: How much is read and sent at once, in bytes; a request has up to 2 MiB of it.
        timeout_s: How long one request may take, in seconds.
    """

    urls: tuple[str, ...] = ()
    index: str = "steward-jobs"
    environments: bool = True
    user: str = ""
    password_file: str = ""
    api_key_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    shards: int = 1
    replicas: int = 1
    batch_bytes: int = 8 * 1024**2
    timeout_s: float = 60.0


class ElasticsearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="elasticsearch"):
    """[archive.sink.NAME] with kind = "elasticsearch": an Elasticsearch 8 or 9."""


class OpenSearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="opensearch"):
    """[archive.sink.NAME] with kind = "opensearch": an OpenSearch 2 or 3."""
