"""``steward archive consume``: an archive that is fed by other Stewards, through Kafka."""

import os
import time
from typing import Annotated, Literal

import typer

from steward.archive.settings import FilesSinkSettings
from steward.cli import options, output
from steward.cli.alone import checked, set_up, settings_path, state_dir
from steward.cli.text import number, safe
from steward.core.config import ArchiveSettings, Settings
from steward.daemon.__main__ import become
from steward.extensions.kafka import ConsumeSettings, KafkaSettings

_NAME = "kafka"
_OPTIONS = {
    "broker": "",
    "certificate_file": "--certificate-file",
    "key_file": "--key-file",
    "sasl": "--sasl",
    "user": "--sasl-user",
    "password_file": "--password-file",
}


def consume(
    source: Annotated[Literal["kafka"], typer.Option("--from", metavar="KIND", help="kafka.")],
    server: Annotated[
        list[str],
        typer.Option(
            "--server",
            metavar="HOST:PORT,…",
            help="Some of the Kafka brokers.",
            callback=options.not_empty,
        ),
    ],
    archive: Annotated[
        str,
        typer.Option("--archive", metavar="DIR", help="Where scripts are kept; made if need be."),
    ],
    topic: Annotated[str, typer.Option("--topic", metavar="T", help="The topic.")] = "steward-jobs",
    group: Annotated[
        str, typer.Option("--group", metavar="G", help="The consumer group.")
    ] = "steward",
    clusters: options.Clusters = None,
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="L", help="As for 'steward archive watch'."),
    ] = "default",
    once: Annotated[
        bool, typer.Option("--once", help="Take what is in the topic now, and end.")
    ] = False,
    state: Annotated[
        str,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Where databases are, on a local disk; in the archive if not given.",
        ),
    ] = "",
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt connections.")] = False,
    ca_file: Annotated[
        str,
        typer.Option("--ca-file", metavar="FILE", help="What brokers' certificates are of."),
    ] = "",
    certificate_file: Annotated[
        str, typer.Option("--certificate-file", metavar="FILE", help="Our own certificate.")
    ] = "",
    key_file: Annotated[
        str, typer.Option("--key-file", metavar="FILE", help="The key of that certificate.")
    ] = "",
    sasl: Annotated[
        Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"],
        typer.Option("--sasl", metavar="HOW", help="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512."),
    ] = "",
    sasl_user: Annotated[
        str, typer.Option("--sasl-user", metavar="NAME", help="Who we are, for SASL.")
    ] = "",
    password_file: Annotated[
        str, typer.Option("--password-file", metavar="FILE", help="Holds the password for SASL.")
    ] = "",
) -> None:
    """Keep what others send to Kafka.

    Needs no configuration file, and changes nothing but DIR. Offsets are
    committed for the group when what they stand for is on disk. Ctrl-C ends it;
    started again it goes on where it was.
    """
    del source
    root = os.path.abspath(archive)
    broker = KafkaSettings(
        servers=options.split(server),
        topic=topic,
        tls=tls,
        ca_file=_absolute(ca_file),
        certificate_file=_absolute(certificate_file),
        key_file=_absolute(key_file),
        sasl=sasl,
        user=sasl_user,
        password_file=_absolute(password_file),
    )
    settings = checked(
        Settings(
            state_dir=os.path.abspath(state) if state else state_dir(root, f"consume-{topic}"),
            consume={
                _NAME: ConsumeSettings(broker=broker, group=group, clusters=options.split(clusters))
            },
            archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=root, layout=layout)}),
            log_level="warning" if once else "info",
        ),
        "consume",
        _OPTIONS,
    )
    settings = set_up(root, settings, "consume")
    if once:
        raise typer.Exit(_once(settings, root))
    become(settings_path(root))


def _absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _once(settings: Settings, root: str) -> int:
    from steward.core.logs import set_up as set_up_log
    from steward.daemon.once import run_once

    set_up_log(settings.log_level)
    os.umask(0o077)
    began = time.monotonic()
    report = run_once(settings)
    took_s = time.monotonic() - began
    topic = settings.consume[_NAME].broker.topic
    print(
        f"Took {number(report.captured, 'message')} of topic {safe(topic)} into {safe(root)}; "
        f"it took {took_s:.1f} s."
    )
    for name, reason in report.waiting.items():
        output.warn(f"{name} could not go on: {reason}")
    output.note(f"  steward archive list --archive {safe(root)}")
    return 1 if report.waiting else 0
