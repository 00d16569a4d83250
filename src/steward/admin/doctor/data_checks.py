"""Health checks of Steward's data: journal, sinks, gaps, nodes, rules, prices, ledger, gate.

Each public check takes the context of the checks and yields findings; ``checks.py`` lists them.
Several call an action of the package concerned (``archive.sinks``, ``accounting.gaps``,
``rules.check``, ``bank.check``). The checks of sinks, of the node listener, of the gate and of a
remote bank also connect to these.
"""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from steward.admin.doctor.context import CheckContext, ClusterReport, make_cluster_check
from steward.admin.doctor.findings import (
    CheckFinding,
    format_count,
    make_ok,
    make_skipped,
    make_warning,
    make_wrong,
)
from steward.archive.files import permissions
from steward.archive.settings import FilesSinkSettings
from steward.bank.errors import NoRate
from steward.bank.gate.client import GateClient
from steward.bank.prices import find_rate
from steward.capture.nodes.last_seen import RECENT_PERIOD, NodeReportsReader, list_recent_refusals
from steward.capture.settings import NodesSettings
from steward.core.config import AnySinkSettings, Settings
from steward.core.errors import Unavailable
from steward.core.events import utc_now
from steward.core.journal import JournalReader, refill_command
from steward.core.listeners import split_host_port
from steward.extensions.kafka import KafkaSettings, KafkaSinkSettings
from steward.extensions.mybrc import MybrcClient, RemoteFailed, RemoteRejected, RemoteUnavailable
from steward.extensions.search_servers import SearchSinkSettings
from steward.slurm import ClusterQueries

_BACKLOG_S: Final = 600.0
"""Age of a sink's oldest outstanding event, in seconds, that is an error."""
_KAFKA_S: Final = 10.0
"""Time-out of queries of brokers and search servers, in seconds."""
_LISTENER_S: Final = 5.0
"""Time-out of connecting to the node listener, in seconds."""


def check_journal(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that every consumer keeps up and has no dead letters."""
    path = f"{ground.settings.state_dir}/journal.db"
    reader = JournalReader(ground.settings.state_dir)
    try:
        consumers = reader.consumers()
    finally:
        reader.close()
    strange = False
    for one in consumers:
        if one.detached or one.missed:
            strange = True
            yield make_wrong(
                path,
                f"it was detached, and has missed {format_count(one.missed, 'event')}",
                *((refill_command(one.name, one.missed_from),) if one.missed else ()),
                of=one.name,
            )
        elif one.state != "running":
            strange = True
            yield make_wrong(path, f"it waits: {one.detail}", "steward journal status", of=one.name)
        if one.dead:
            strange = True
            yield make_wrong(
                path,
                f"{format_count(one.dead, 'event')} set aside, which it could not put to use",
                f"steward journal dead {one.name}",
                f"steward journal replay {one.name}",
                of=one.name,
            )
    if not strange:
        yield make_ok(
            path, f"{format_count(len(consumers), 'consumer')} to read it, and nothing set aside"
        )


def check_sinks(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that each sink is reachable and keeps up."""
    if ground.settings.forward.to:
        yield make_skipped("archive.sinks", f"{ground.settings.forward.to} keeps the archive")
        return
    for line in ground.ask("archive.sinks").sinks:
        of = ground.settings.archive.sink.get(line.name)
        if of is None:
            yield make_warning(
                line.name,
                "it is configured no more, and the journal waits for it",
                f"steward journal forget archive.{line.name}",
                of=line.name,
            )
            continue
        where, error = _try_sink(ground, line.name, of)
        mend = ("steward archive sinks", "journalctl -u steward -p warning")
        if error:
            yield make_wrong(where, f"it cannot be reached: {error}", *mend, of=line.name)
        elif line.oldest_s is not None and line.oldest_s > _BACKLOG_S:
            yield make_wrong(
                where,
                f"{format_count(line.backlog, 'script')} to go there, the oldest for "
                f"{line.oldest_s:.0f} s: "
                f"{line.detail or line.error or 'the daemon does not run, or it is slow'}",
                *mend,
                of=line.name,
            )
        else:
            yield make_ok(
                where,
                f"it can be reached, with {format_count(line.backlog, 'script')} to go there",
                of=line.name,
            )


def _try_sink(ground: CheckContext, name: str, of: AnySinkSettings) -> tuple[str, str]:
    """Return a sink's address and the error of connecting to it, "" for none."""
    where = _describe_sink_place(ground, name, of)
    try:
        if isinstance(of, FilesSinkSettings):
            os.listdir(where)
        elif isinstance(of, SearchSinkSettings):
            _query_search(of)
        else:
            _query_kafka(of, name)
    except Unavailable as error:
        return where, str(error)
    except OSError as error:
        return where, error.strerror or str(error)
    return where, ""


def _describe_sink_place(ground: CheckContext, name: str, of: AnySinkSettings) -> str:
    if isinstance(of, FilesSinkSettings):
        return ground.settings.sink_path(name)
    if isinstance(of, SearchSinkSettings):
        return ", ".join(of.urls)
    return f"topic {of.broker.topic} at {', '.join(of.broker.servers)}"


def _query_search(of: SearchSinkSettings) -> None:
    from steward.extensions.search_servers import SearchClient, check_product

    client = SearchClient(msgspec.structs.replace(of, timeout_s=min(of.timeout_s, _KAFKA_S)))
    try:
        check_product(client)
    finally:
        client.close()


def _query_kafka(of: KafkaSinkSettings, name: str) -> None:
    """Query a Kafka broker for the sink's topic."""
    from steward.extensions.kafka import KafkaConnection, KafkaUnavailable

    broker: KafkaSettings = of.broker
    reached = KafkaConnection(broker, f"doctor.{name}")
    producer = reached.make("Producer", {})
    try:
        producer.list_topics(broker.topic, timeout=min(broker.timeout_s, _KAFKA_S))
    except reached.lib.KafkaException as error:
        raise KafkaUnavailable(reached.told(error.args[0])) from error


def check_acls(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that each archive's file system has ACLs, which admit owners to their files."""
    looked_at = "POSIX access control lists"
    trees = ground.settings.files_sinks()
    for name, sink in trees.items():
        for path in filter(None, (ground.settings.sink_path(name), sink.move_to)):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                yield make_skipped(f"{looked_at} on {path}", f"{error.strerror}", of=name)
                continue
            try:
                has = permissions.supports_acls(fd)
            finally:
                os.close(fd)
            if has:
                yield make_ok(f"{looked_at} on {path}", "owners are let in to their files", of=name)
            else:
                yield make_warning(
                    f"{looked_at} on {path}",
                    "there are none: files are Steward's alone, owners see them by commands only",
                    "mount it with the option acl, or take another file system",
                    of=name,
                )
    if not trees:
        yield make_skipped(looked_at, "there is no sink of files")


def check_gaps(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check for gaps in accounting within the last day."""
    looked_at = "steward accounting gaps -S now-1day"
    if ground.settings.forward.to:
        yield make_skipped(looked_at, f"{ground.settings.forward.to} keeps the books")
        return
    answer = ground.ask("accounting.gaps", since="now-1day")
    counts = Counter(one.kind for one in answer.findings)
    if not counts:
        yield make_ok(looked_at, "nothing is missing of the last day")
    for kind, count in sorted(counts.items()):
        first = next(one for one in answer.findings if one.kind == kind)
        yield make_warning(
            looked_at, f"{format_count(count, 'time')}; {first.words}", looked_at, of=kind
        )


def check_agents(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that the agents of compute nodes report and are accepted."""
    looked_at = "steward agent on compute nodes"
    if not ground.settings.nodes.listen:
        yield make_skipped(looked_at, "[nodes] listen is not set")
        return
    try:
        heard = NodeReportsReader(ground.settings.state_dir)
    except Unavailable:
        found, silent = 0, []
    else:
        found = len(heard.nodes())
        silent = heard.silent_since(utc_now() - RECENT_PERIOD)
        heard.close()
    away = _find_listener_error(ground.settings.nodes)
    if away:
        yield make_wrong(
            looked_at,
            f"nothing listens at {ground.settings.nodes.listen}: {away}",
            "systemctl enable --now steward-listen",
            "journalctl -u steward-listen -p warning",
            of="listener",
        )
        return
    refused = list_recent_refusals(ground.settings.state_dir, utc_now())
    for one in refused:
        yield make_warning(
            looked_at, f"its batch was refused: {one.why}", _suggest_remedy(one.why), of=one.address
        )
    if refused and not (found or silent):
        return
    if not found:
        yield make_warning(
            looked_at,
            f"no node was ever heard at {ground.settings.nodes.listen}",
            "on each node: systemctl enable --now steward-agent.timer",
            "if that is done, on the node: journalctl -u steward-agent",
        )
    elif silent:
        yield make_warning(
            looked_at,
            f"{format_count(len(silent), 'node')} of {found} silent, {silent[0].node} since "
            f"{silent[0].heard_at:%Y-%m-%dT%H:%M:%SZ}",
            f"ssh {silent[0].node} systemctl status steward-agent",
        )
    else:
        yield make_ok(looked_at, f"{format_count(found, 'node')} heard, none of them silent")


def _find_listener_error(nodes: NodesSettings) -> str:
    """Return why a separate node listener does not accept connections; "" if it does."""
    if not nodes.listener:
        return ""
    host, port = split_host_port(nodes.listen) or ("", 0)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- nothing is bound
    try:
        socket.create_connection((host, port), _LISTENER_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _suggest_remedy(why: str) -> str:
    if "credential was made on 127." in why:
        return "on that node: start munged with --origin=ADDRESS, or correct its /etc/hosts"
    return "docs/nodes.md, 'Where nothing arrives'"


def check_rule_files(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that every rule file is valid."""
    looked_at = ", ".join(ground.settings.rules.directories) or "the rules"
    if not ground.settings.rules.enabled:
        yield make_skipped(looked_at, "[rules] enabled is not set")
        return
    answer = ground.ask("rules.check")
    for one in answer.troubles:
        yield make_wrong(one.path, one.what, "steward rules check", of=os.path.basename(one.path))
    if not answer.troubles:
        yield make_ok(looked_at, f"{format_count(answer.rules, 'rule')} to be read, and no other")


_GATE_S: Final = 5.0
"""Time-out of queries of the gate, in seconds."""
_PRICES: Final = "steward bank rate show, and the cluster's partitions"


def _check_prices(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that every partition of a cluster has a rate."""
    if not ground.settings.bank.enabled:
        yield make_skipped(_PRICES, "there is no bank here")
        return
    rates = list(ground.ask("bank.rate_show", cluster=one.name).rates)
    partitions = sorted(ClusterQueries(one.name, one.settings).partitions())
    free = []
    for partition in partitions:
        try:
            find_rate(rates, one.name, partition, "", utc_now())
        except NoRate:
            free.append(partition)
    if free:
        yield make_wrong(
            _PRICES,
            f"{', '.join(free)}: nobody says what jobs cost there, so they are not charged yet",
            f"steward bank rate create {free[0]} --weight cpu=1",
            "steward bank rate create '*' --weight cpu=1",
        )
    else:
        yield make_ok(_PRICES, f"{format_count(len(partitions), 'partition')}, each with a rate")


def check_ledger(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that the ledger adds up and SU holds match jobs."""
    looked_at = "steward bank check"
    if not ground.settings.bank.enabled:
        yield make_skipped(looked_at, "there is no bank here")
        return
    answer = ground.ask("bank.check")
    for one in answer.findings:
        tell = make_warning if one.kind in ("unproved", "job-without-hold") else make_wrong
        yield tell(looked_at, one.what, "steward bank check", of=one.kind)
    if not answer.findings:
        holds = (
            "" if answer.holds is None else f", {format_count(answer.holds, 'hold')} match the jobs"
        )
        yield make_ok(
            looked_at, f"the books of {format_count(answer.accounts, 'account')} add up{holds}"
        )


def check_gate(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that the gate decides and is not switched off."""
    settings = ground.settings
    looked_at = f"{settings.gate.socket}, {settings.gate.off_switch}"
    if not settings.bank.enabled and not settings.gate.ask:
        yield make_skipped(looked_at, "there is no bank here")
        return
    if os.path.exists(settings.gate.off_switch):
        yield make_wrong(
            looked_at,
            f"{settings.gate.off_switch} is there: every job is admitted unasked",
            f"rm {settings.gate.off_switch}",
            of=os.path.basename(settings.gate.off_switch),
        )
    stands = GateClient(settings.state_dir, _GATE_S).state()
    if not stands.deciding and not settings.gate.ask:
        yield make_wrong(
            looked_at,
            f"it does not decide: {stands.why}; the policy {settings.gate.policy} holds",
            "journalctl -u steward -p warning",
        )
    elif settings.gate.ask:
        yield make_ok(looked_at, f"it asks the gate at {settings.gate.ask}")
    else:
        yield make_ok(looked_at, f"it decides, and has {format_count(stands.holds, 'open hold')}")


def check_remote_bank(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that a remote myBRC server answers and its balances are recent."""
    url = ground.settings.bank.remote.url
    if not ground.settings.bank.enabled or not url:
        yield make_skipped("[bank.remote] url", "no myBRC server elsewhere is told")
        return
    if not ground.is_root and ground.uid != ground.own_uid:
        yield make_skipped(url, "its token is for Steward's user alone: run this as root")
        return
    server = MybrcClient(ground.settings)
    try:
        server.look()
    except (RemoteUnavailable, RemoteFailed, RemoteRejected) as error:
        yield make_wrong(
            url,
            f"{error}; charges and holds wait until it takes them",
            "steward config show, and [bank.remote] in it",
        )
    else:
        yield make_ok(url, "it answers")
        if ground.settings.bank.remote.balances:
            yield _check_remote_balances(ground.settings, url)
    finally:
        server.close()


def _check_remote_balances(settings: Settings, url: str) -> CheckFinding:
    """Check the age of the balances from the remote server."""
    at_us = GateClient(settings.state_dir, _GATE_S).state().remote_at_us
    age_s = time.time() - at_us / 1e6
    if at_us and age_s <= settings.bank.remote.balance_age_s:
        return make_ok(url, f"the oldest balance was asked for {age_s:.0f} s ago")
    what = f"a balance was last asked for {age_s:.0f} s ago" if at_us else "no balance is known"
    return make_wrong(
        url,
        f"{what}: for such accounts the policy {settings.gate.policy} holds",
        "journalctl -u steward -p warning",
    )


check_prices = make_cluster_check(_PRICES, _check_prices)
