"""Kafka: one broker that is its own controller.

It listens without TLS and, on request, on two more ports: with TLS and a password, and with TLS
and a client certificate.
"""

import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from servers.authority import Authority
from servers.jars import directory_of
from servers.server import HOST, DidNotStart, Server, free_port

_FORMAT_TIMEOUT_S: Final = 60.0
_ADMIN_TIMEOUT_S: Final = 10.0


class Kafka(Server):
    """Broker of Kafka.

    Args:
        directory: Directory of its data and log.
        properties: Further lines of server.properties, such as ``message.max.bytes``.
        secured: Whether it has the other two listeners, and its own authority.
    """

    user = "steward"
    password = "correct horse"  # the secured listener's

    def __init__(
        self,
        directory: Path,
        properties: Mapping[str, str] | None = None,
        *,
        secured: bool = False,
    ) -> None:
        super().__init__("kafka", directory)
        self._port = free_port()
        self._controller_port = free_port()
        self._secured_port = free_port()
        self._mutual_port = free_port()
        self._properties = dict(properties or {})
        self._config = directory / "server.properties"
        self._authority = Authority(directory / "tls") if secured else None

    @property
    def bootstrap(self) -> str:
        """Address of the plain listener, for ``bootstrap.servers``."""
        return f"{HOST}:{self._port}"

    @property
    def secured(self) -> str:
        """Address of the SASL_SSL listener: PLAIN and SCRAM-SHA-512, with `user` and `password`."""
        return f"{HOST}:{self._secured_port}"

    @property
    def mutual(self) -> str:
        """Address of the listener for SSL, which requires a certificate of the authority."""
        return f"{HOST}:{self._mutual_port}"

    @property
    def authority(self) -> Authority:
        """Authority that signs for the broker and for clients."""
        assert self._authority is not None, "it was not asked to be secured"
        return self._authority

    def command(self) -> Sequence[str]:
        if not self._config.exists():
            self._format()
        return self._kafka("kafka.Kafka", str(self._config))

    def answers(self) -> bool:
        from confluent_kafka import KafkaException

        try:
            return bool(self.admin().list_topics(timeout=2.0).brokers)
        except KafkaException:
            return False  # it does not listen yet

    def admin(self) -> Any:
        """Return a new AdminClient of the broker."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Make a topic; ``max_message_bytes="1"`` stands for the setting ``max.message.bytes``."""
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

        config = {key.replace("_", "."): value for key, value in settings.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        admin = self.admin()  # its answer dies with it
        made = admin.create_topics([topic], operation_timeout=_ADMIN_TIMEOUT_S)
        made[name].result(_ADMIN_TIMEOUT_S)

    def _kafka(self, *words: str) -> Sequence[str]:
        where = ("-cp", f"{directory_of(self.name)}/lib/*")
        return self.java(*where, "-Dorg.slf4j.simpleLogger.showDateTime=true", *words)

    def _format(self) -> None:
        """Write its settings, and make its log directory, which Kafka does not do by itself."""
        lines = [f"{key}={value}" for key, value in self._settings().items()]
        unready = self._config.with_suffix(".new")
        unready.write_text("\n".join(lines) + "\n")
        result = subprocess.run(
            self._kafka(
                *("kafka.tools.StorageTool", "format", "-t", str(uuid.uuid4())),
                *("-c", str(unready)),
                *(("--add-scram", self._scram()) if self._authority else ()),
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            raise DidNotStart(f"kafka could not be set up:\n{result.stdout}{result.stderr}")
        unready.rename(self._config)

    def _scram(self) -> str:
        return f"SCRAM-SHA-512=[name={self.user},password={self.password}]"

    def _settings(self) -> dict[str, str]:
        listeners = {"PLAINTEXT": self.bootstrap}
        protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
        if self._authority is not None:
            listeners |= {"SECURED": self.secured, "MUTUAL": self.mutual}
            protocols |= {"SECURED": "SASL_SSL", "MUTUAL": "SSL"}
        advertised = ",".join(f"{name}://{where}" for name, where in listeners.items())
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self._controller_port}",
            "listeners": f"{advertised},CONTROLLER://{HOST}:{self._controller_port}",
            "advertised.listeners": advertised,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": ",".join(
                f"{name}:{protocol}" for name, protocol in protocols.items()
            ),
            "log.dirs": str(self.directory / "data"),
            "num.partitions": "1",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A killed broker may register again only when its old session has expired.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            **(self._security(self._authority) if self._authority else {}),
            **self._properties,
        }

    def _security(self, authority: Authority) -> dict[str, str]:
        certificate, key = authority.certificate("IP:127.0.0.1")
        both = self.directory / "tls" / "broker-chain.pem"
        both.write_text(Path(key).read_text() + Path(certificate).read_text())
        modules = "org.apache.kafka.common.security"
        listener = "listener.name.secured"
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": authority.file,
            "listener.name.mutual.ssl.client.auth": "required",
            f"{listener}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            f"{listener}.plain.sasl.jaas.config": (
                f'{modules}.plain.PlainLoginModule required user_{self.user}="{self.password}";'
            ),
            f"{listener}.scram-sha-512.sasl.jaas.config": (
                f"{modules}.scram.ScramLoginModule required;"
            ),
        }
