"""Tables of docs/configuration.md, generated from the descriptions of each key."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from steward.accounting.settings import AccountingSettings, MailSettings
from steward.archive.settings import FilesSinkSettings, LimitSettings, SinkSettings
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.bank.settings import (
    BankPartitionSettings,
    BankSettings,
    GateSettings,
    NotifySettings,
    RejectionSettings,
    RemoteBankSettings,
)
from steward.capture.settings import NodesSettings, SensorSettings
from steward.core.config import (
    AccessSettings,
    ArchiveSettings,
    JournalSettings,
    RedactSettings,
    Settings,
)
from steward.core.section import Section, TlsReference, TlsSettings
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.extensions.kafka.settings import ConsumeSettings, KafkaSettings, KafkaSinkSettings
from steward.extensions.mybrc.settings import MybrcSettings
from steward.extensions.search_servers.settings import SearchSinkSettings
from steward.slurm.settings import ClusterSettings
from steward.web.settings import WebSettings

_SECTIONS: tuple[type[Section], ...] = (
    Settings,
    ClusterSettings,
    ArchiveSettings,
    SinkSettings,
    FilesSinkSettings,
    LimitSettings,
    SearchSinkSettings,
    KafkaSinkSettings,
    KafkaSettings,
    ConsumeSettings,
    RedactSettings,
    AccessSettings,
    JournalSettings,
    TlsSettings,
    ReceiveSettings,
    ForwardSettings,
    NodesSettings,
    AccountingSettings,
    MailSettings,
    BankSettings,
    BankPartitionSettings,
    RejectionSettings,
    NotifySettings,
    RemoteBankSettings,
    GateSettings,
    MybrcSettings,
    SensorSettings,
    ActionsSettings,
    RulesSettings,
    WebSettings,
)
_COMMON: tuple[tuple[type[Section], tuple[str, ...]], ...] = (
    (Settings, ("state_dir", "log_level")),
    (ClusterSettings, ("slurm_conf", "timezone")),
    (ArchiveSettings, ("environments",)),
    (SinkSettings, ("retention_days",)),
    (FilesSinkSettings, ("path", "groups", "compress")),
    (RedactSettings, ("names",)),
    (AccessSettings, ("operators", "coordinators_read_scripts")),
    (NodesSettings, ("listen", "tls")),
    (MailSettings, ("program",)),
    (BankSettings, ("enabled", "unpaid")),
    (GateSettings, ("policy",)),
    (SensorSettings, ("enabled",)),
    (RulesSettings, ("mode",)),
    (WebSettings, ("listen", "url")),
)
"""The settings that people change, with which the reference begins."""
_KEY = re.compile(r"^    (\w+): (.*)$")
_TABLE = re.compile(r"^(\[[\w.]+\](?:, \[[\w.]+\])*)( with [^:]*)?: (.*)$")
_TITLE = "## The top of the file"


def reference() -> str:
    """Return the common settings, then every table of the file: keys, defaults and meanings."""
    tables = (line for section in _SECTIONS for line in _table(section))
    return "\n".join([*_common(), *tables])


def _common() -> Iterator[str]:
    yield "## Common settings"
    yield ""
    yield "| table | key | default | meaning |"
    yield "|---|---|---|---|"
    for section, names in _COMMON:
        named = _TABLE.match(inspect.cleandoc(section.__doc__ or "").partition("\n")[0])
        rows = dict(_rows(section))
        for name in names:
            yield f"| {f'`{named[1]}`' if named else 'top of the file'} {rows[name]}"
    yield ""


def _table(section: type[Section]) -> Iterator[str]:
    text = inspect.cleandoc(section.__doc__ or "")
    first, _, more = text.partition("Attributes:\n")[0].strip().partition("\n")
    named = _TABLE.match(first)
    if named is None and section is not Settings:
        raise ValueError(
            f"{section.__name__}: the docstring does not begin with its table: {first!r}"
        )
    yield f"## `{named[1]}`{named[2] or ''}" if named else _TITLE
    yield ""
    if named:
        yield _sentence(_markdown([named[3]]))
        if more.strip():
            yield ""
            yield more.strip()
        yield ""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    yield from (row for _, row in _rows(section))
    yield ""


def _rows(section: type[Section]) -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its row."""
    attributes = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")[2]
    meanings = dict(_meanings(attributes))
    base = section.__mro__[1]
    own = base is Section or section is Settings
    inherited = set() if own else {field.name for field in msgspec.structs.fields(base)}
    for field in msgspec.structs.fields(section):
        if field.name in inherited or _is_table(field) or _is_table_factory(field):
            continue
        default = _default(_default_of(field))
        yield field.name, f"| `{field.name}` | {default} | {meanings[field.name]} |"


def _meanings(attributes: str) -> Iterator[tuple[str, str]]:
    name, words = "", [""]
    for line in attributes.splitlines():
        match = _KEY.match(line)
        if match:
            if name:
                yield name, _markdown(words)
            name, words = match[1], [match[2]]
        else:
            words.append(line.strip())
    yield name, _markdown(words)


def _markdown(words: list[str]) -> str:
    return " ".join(words).strip().replace("``", "`").replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_table(field: Any) -> bool:
    return isinstance(field.default, Section | dict)


def _is_table_factory(field: Any) -> bool:
    factory = field.default_factory
    return (
        factory is not msgspec.NODEFAULT
        and isinstance(factory(), dict)
        and field.type != dict[str, str]
    )


def _default_of(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return "" if field.type == TlsReference else field.default


def _default(value: Any) -> str:
    if value in (None, "", (), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{msgspec.json.encode(value).decode()}`"
