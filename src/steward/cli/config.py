"""``steward config``: check the configuration file, or show its settings and their origin.

``check`` prints a summary (clusters, sinks, retention, sources) with warnings for what is missing
on this host; ``show`` prints every setting as TOML or JSON.
"""

from collections.abc import Iterator
from typing import Annotated

from steward.accounting.settings import MailSettings
from steward.archive.settings import FilesSinkSettings
from steward.cli import output
from steward.cli.options import Json
from steward.cli.output import format_count, format_size, print_json
from steward.cli.parameters import Group, Option
from steward.core.config import Settings, convert_to_builtins
from steward.core.config.checks import find_extension_problems, find_missing_resources
from steward.core.config.reader import (
    DEFAULT_PATH,
    load_with_lines,
    make_config_error,
    render_config,
)
from steward.core.section import TlsReference
from steward.extensions.kafka import KafkaSinkSettings

app = Group("Check or show the configuration.")

ConfigFile = Annotated[
    str,
    Option(
        "--config", envvar="STEWARD_CONFIG", metavar="FILE", help="Configuration file to check."
    ),
]


@app.subcommand()
def check(config: ConfigFile = DEFAULT_PATH) -> None:
    """Check the configuration; the exit code is 2 if it is invalid.

    A file, user or Python package that is missing on this host is a warning.
    """
    settings, warnings = _load_checked(config)
    clusters = ", ".join(settings.cluster)
    sinks = ", ".join(_describe_sink(settings, name) for name in settings.archive.sink)
    print(
        f"{config} is valid"
        + (f", with {format_count(len(warnings), 'warning')}." if warnings else ".")
    )
    if clusters:
        print(f"  clusters  {clusters}")
    if settings.forward.to:
        forward = settings.forward
        security = _describe_security(forward.tls, is_server=False)
        print(f"  forwards  to {forward.to}, {security}")
    else:
        print(f"  archive   {sinks}")
        for line in _list_retention(settings):
            print(f"  removes   {line}")
    if settings.receive.listen:
        receive = settings.receive
        print(f"  receives  at {receive.listen}, {_describe_security(receive.tls)}")
    for line in _list_sources(settings):
        print(f"  {line}")
    for source in settings.consume.values():
        print(f"  consumes  {source.broker.topic} at {', '.join(source.broker.servers)}")
    print(f"  state     {settings.state_dir}")
    for warning in warnings:
        output.print_warning(warning)


def _list_sources(settings: Settings) -> Iterator[str]:
    """Yield lines on the sources of job events, and on accounting plugins and mail."""
    for name, cluster in settings.cluster.items():
        if cluster.jobcomp_lines:
            yield f"jobcomp   of {name} in {cluster.jobcomp_lines}"
    nodes = settings.nodes
    if nodes.listen:
        yield f"nodes     at {nodes.listen}, {_describe_security(nodes.tls)}"
    if not settings.forward.to:
        yield f"plugins   {settings.accounting.type}"
    if settings.mail != MailSettings():
        yield f"mail      by {settings.mail.program}"


def _describe_security(tls: TlsReference, *, is_server: bool = True) -> str:
    """Describe what authenticates the client of a connection, and whether it is encrypted."""
    if tls is None:
        return "authenticated by MUNGE"
    certificates = tls.client_ca_file if is_server else tls.certificate_file
    return f"authenticated by {'certificates' if certificates else 'MUNGE'}, encrypted"


def _load_checked(path: str) -> tuple[Settings, list[str]]:
    """Return the settings of a file and warnings about them; raise the first mistake."""
    loaded_config = load_with_lines(path)
    for problem in find_extension_problems(loaded_config.settings):
        raise make_config_error(problem, loaded_config)
    return loaded_config.settings, [
        str(make_config_error(problem, loaded_config))
        for problem in find_missing_resources(loaded_config.settings)
    ]


def _list_retention(settings: Settings) -> Iterator[str]:
    """Yield a line for each retention rule and quota of a sink."""
    for name, sink in settings.archive.sink.items():
        if sink.retention_days:
            yield f"from {name}: scripts older than {format_count(sink.retention_days, 'day')}"
        for limit in sink.limit.values() if isinstance(sink, FilesSinkSettings) else ():
            owner_kind = "account" if limit.accounts else "user"
            days = f"scripts older than {format_count(limit.days, 'day')}" if limit.days else ""
            size_rule = f"scripts beyond {format_size(limit.max_bytes)} bytes of each {owner_kind}"
            rules = ", ".join(part for part in (days, size_rule if limit.max_bytes else "") if part)
            scope = [f"users {', '.join(limit.users)}"] if limit.users else []
            scope += [f"accounts {', '.join(limit.accounts)}"] if limit.accounts else []
            yield f"from {name}: {rules}" + (f" ({' and '.join(scope)})" if scope else "")


def _describe_sink(settings: Settings, name: str) -> str:
    """Describe where a sink writes: a directory, or servers."""
    sink = settings.archive.sink[name]
    if isinstance(sink, FilesSinkSettings):
        return f"{name} in {settings.sink_path(name)}"
    servers = sink.broker.servers if isinstance(sink, KafkaSinkSettings) else sink.urls
    return f"{name} at {', '.join(servers)}"


@app.subcommand()
def show(config: ConfigFile = DEFAULT_PATH, as_json: Json = False) -> None:
    """Print every setting with its origin, in the format of the file."""
    loaded_config = load_with_lines(config)
    if as_json:
        print_json(convert_to_builtins(loaded_config.settings))
    else:
        # TOML is UTF-8, whatever the terminal's encoding.
        output.write_bytes(render_config(loaded_config).encode())
