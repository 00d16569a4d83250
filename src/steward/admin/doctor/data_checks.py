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
from steward.capture.nodes.node_reports import (
    RECENT_PERIOD,
    NodeReportsReader,
    list_recent_refusals,
)
from steward.capture.settings import NodesSettings
from steward.core.config import AnySinkSettings, Settings
from steward.core.databases import JOURNAL
from steward.core.errors import Unavailable
from steward.core.events import utc_now
from steward.core.journal import JournalReader, refill_command
from steward.core.listeners import split_host_port
from steward.core.sqlite import SqliteMissing
from steward.extensions.kafka import KafkaSettings, KafkaSinkSettings
from steward.extensions.search_servers import SearchSinkSettings

_BACKLOG_S: Final = 600.0
"""Age of a sink's oldest outstanding event, in seconds, that is an error."""
_KAFKA_S: Final = 10.0
"""Time-out of queries of brokers and search servers, in seconds."""
_LISTENER_S: Final = 5.0
"""Time-out of connecting to the node listener, in seconds."""


def check_journal(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that every consumer keeps up and has no dead letters."""
    path = JOURNAL.locate(context.settings.state_dir)
    reader = JournalReader(context.settings.state_dir)
    try:
        consumers = reader.list_consumers()
    finally:
        reader.close()
    has_problem = False
    for consumer in consumers:
        if consumer.detached or consumer.missed:
            has_problem = True
            yield make_wrong(
                path,
                f"detached: it has missed {format_count(consumer.missed, 'event')}",
                *(
                    (refill_command(consumer.name, consumer.missed_from),)
                    if consumer.missed
                    else ()
                ),
                name=consumer.name,
            )
        elif consumer.state != "running":
            has_problem = True
            yield make_wrong(
                path,
                f"unavailable, retrying: {consumer.detail}",
                "steward journal status",
                name=consumer.name,
            )
        if consumer.dead_letters:
            has_problem = True
            yield make_wrong(
                path,
                f"{format_count(consumer.dead_letters, 'event')} in its dead letters",
                f"steward journal dead {consumer.name}",
                f"steward journal retry {consumer.name}",
                name=consumer.name,
            )
    if not has_problem:
        yield make_ok(path, f"{format_count(len(consumers), 'consumer')}, no dead letters")


def check_sinks(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that each sink is reachable and keeps up."""
    if context.settings.forward.to:
        yield make_skipped("archive.sinks", f"{context.settings.forward.to} has the archive")
        return
    for line in context.call_action("archive.sinks").sinks:
        sink = context.settings.archive.sink.get(line.name)
        if sink is None:
            yield make_warning(
                line.name,
                "the sink was removed from the configuration, but the journal keeps events for it",
                f"steward journal forget archive.{line.name}",
                name=line.name,
            )
            continue
        address, error = _try_sink(context, line.name, sink)
        fix = ("steward archive sinks", "journalctl -u steward -p warning")
        if error:
            yield make_wrong(address, f"unavailable: {error}", *fix, name=line.name)
        elif line.oldest_s is not None and line.oldest_s > _BACKLOG_S:
            yield make_wrong(
                address,
                f"lag of {format_count(line.backlog, 'script')}, the oldest "
                f"{line.oldest_s:.0f} s old: "
                f"{line.detail or line.error or 'the daemon does not run, or it is slow'}",
                *fix,
                name=line.name,
            )
        else:
            yield make_ok(
                address,
                f"available, lag of {format_count(line.backlog, 'script')}",
                name=line.name,
            )


def _try_sink(context: CheckContext, name: str, sink: AnySinkSettings) -> tuple[str, str]:
    """Return a sink's address and the error of connecting to it, "" for none."""
    address = _describe_sink_place(context, name, sink)
    try:
        if isinstance(sink, FilesSinkSettings):
            os.listdir(address)
        elif isinstance(sink, SearchSinkSettings):
            _query_search(sink)
        else:
            _query_kafka(sink, name)
    except Unavailable as error:
        return address, str(error)
    except OSError as error:
        return address, error.strerror or str(error)
    return address, ""


def _describe_sink_place(context: CheckContext, name: str, sink: AnySinkSettings) -> str:
    if isinstance(sink, FilesSinkSettings):
        return context.settings.sink_path(name)
    if isinstance(sink, SearchSinkSettings):
        return ", ".join(sink.urls)
    return f"topic {sink.broker.topic} at {', '.join(sink.broker.servers)}"


def _query_search(sink: SearchSinkSettings) -> None:
    from steward.extensions.search_servers import SearchClient, check_product

    client = SearchClient(sink, _KAFKA_S)
    try:
        check_product(client)
    finally:
        client.close()


def _query_kafka(sink: KafkaSinkSettings, name: str) -> None:
    """Query a Kafka broker for the sink's topic."""
    from steward.extensions.kafka import KafkaConnection, KafkaUnavailable

    broker: KafkaSettings = sink.broker
    connection = KafkaConnection(broker, f"doctor.{name}")
    producer = connection.create_client("Producer", {})
    try:
        producer.list_topics(broker.topic, timeout=_KAFKA_S)
    except connection.lib.KafkaException as error:
        raise KafkaUnavailable(connection.describe_error(error.args[0])) from error


def check_acls(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that each archive's file system has ACLs, which admit owners to their files."""
    checked = "POSIX access control lists"
    trees = context.settings.files_sinks()
    for name, sink in trees.items():
        for path in filter(None, (context.settings.sink_path(name), sink.move_to)):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                yield make_skipped(f"{checked} on {path}", f"{error.strerror}", name=name)
                continue
            try:
                has_acls = permissions.supports_acls(fd)
            finally:
                os.close(fd)
            if has_acls:
                yield make_ok(f"{checked} on {path}", "owners can read their files", name=name)
            else:
                yield make_warning(
                    f"{checked} on {path}",
                    "not supported: only Steward can read the files; owners use commands",
                    "mount the file system with the option acl, or use another one",
                    name=name,
                )
    if not trees:
        yield make_skipped(checked, "no sink of kind 'files' is configured")


def check_gaps(context: CheckContext) -> Iterator[CheckFinding]:
    """Check for gaps in accounting within the last day."""
    checked = "steward accounting gaps -S now-1day"
    if context.settings.forward.to:
        yield make_skipped(checked, f"{context.settings.forward.to} has the job records")
        return
    answer = context.call_action("accounting.gaps", since="now-1day")
    counts = Counter(finding.kind for finding in answer.findings)
    if not counts:
        yield make_ok(checked, "no gaps in the last day")
    for kind, count in sorted(counts.items()):
        first = next(finding for finding in answer.findings if finding.kind == kind)
        yield make_warning(
            checked, f"{format_count(count, 'time')}; {first.missing}", checked, name=kind
        )


def check_agents(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the agents of compute nodes report and are accepted."""
    checked = "steward agent on compute nodes"
    if not context.settings.nodes.listen:
        yield make_skipped(checked, "[nodes] listen is not set")
        return
    try:
        reports = NodeReportsReader(context.settings.state_dir)
    except SqliteMissing:
        count, silent_nodes = 0, []
    else:
        count = len(reports.read_reports())
        silent_nodes = reports.read_silent(utc_now() - RECENT_PERIOD)
        reports.close()
    listener_error = _find_listener_error(context.settings.nodes)
    if listener_error:
        yield make_wrong(
            checked,
            f"no listener at {context.settings.nodes.listen}: {listener_error}",
            "systemctl enable --now steward-listen",
            "journalctl -u steward-listen -p warning",
            name="listener",
        )
        return
    refusals = list_recent_refusals(context.settings.state_dir, utc_now())
    for refusal in refusals:
        yield make_warning(
            checked,
            f"its batch was rejected: {refusal.why}",
            _suggest_remedy(refusal.why),
            name=refusal.address,
        )
    if refusals and not (count or silent_nodes):
        return
    if not count:
        yield make_warning(
            checked,
            f"no node has ever reported to {context.settings.nodes.listen}",
            "on each node: systemctl enable --now steward-agent.timer",
            "if that is done, on the node: journalctl -u steward-agent",
        )
    elif silent_nodes:
        yield make_warning(
            checked,
            f"{format_count(len(silent_nodes), 'node')} of {count} silent, "
            f"{silent_nodes[0].node} since "
            f"{silent_nodes[0].heard_at:%Y-%m-%dT%H:%M:%SZ}",
            f"ssh {silent_nodes[0].node} systemctl status steward-agent",
        )
    else:
        yield make_ok(checked, f"{format_count(count, 'node')} reported, none silent")


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


def _suggest_remedy(reason: str) -> str:
    if "credential was made on 127." in reason:
        return "on that node: start munged with --origin=ADDRESS, or correct its /etc/hosts"
    return "docs/nodes.md, 'Where nothing arrives'"


def check_rule_files(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that every rule file is valid."""
    checked = ", ".join(context.settings.rules.directories) or "the rules"
    if not context.settings.rules.is_enabled:
        yield make_skipped(checked, "[rules] mode is off")
        return
    answer = context.call_action("rules.check")
    for problem in answer.problems:
        yield make_wrong(
            problem.path,
            problem.problem,
            "steward rules check",
            name=os.path.basename(problem.path),
        )
    if not answer.problems:
        yield make_ok(checked, f"{format_count(answer.rules, 'rule')}, all valid")


_GATE_S: Final = 5.0
"""Time-out of queries of the gate, in seconds."""
_PRICES: Final = "steward bank rate show, and the cluster's partitions"


def _check_prices(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that every partition of a cluster has a rate."""
    if not context.settings.bank.enabled:
        yield make_skipped(_PRICES, "the bank is disabled")
        return
    rates = list(context.call_action("bank.rate_show", cluster=report.name).rates)
    partitions = sorted(report.queries.partitions())
    unpriced = []
    for partition in partitions:
        try:
            find_rate(rates, report.name, partition, "", utc_now())
        except NoRate:
            unpriced.append(partition)
    if unpriced:
        yield make_wrong(
            _PRICES,
            f"partitions without a rate, whose jobs are not charged yet: {', '.join(unpriced)}",
            f"steward bank rate create {unpriced[0]} --weight cpu=1",
            "steward bank rate create '*' --weight cpu=1",
        )
    else:
        yield make_ok(_PRICES, f"{format_count(len(partitions), 'partition')}, each with a rate")


def check_ledger(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the ledger adds up and SU holds match jobs."""
    checked = "steward bank check"
    if not context.settings.bank.enabled:
        yield make_skipped(checked, "the bank is disabled")
        return
    answer = context.call_action("bank.check")
    for finding in answer.findings:
        make_finding = (
            make_warning if finding.kind in ("unproved", "job-without-hold") else make_wrong
        )
        yield make_finding(checked, finding.finding, "steward bank check", name=finding.kind)
    if not answer.findings:
        holds = (
            "" if answer.holds is None else f", {format_count(answer.holds, 'hold')} match the jobs"
        )
        yield make_ok(
            checked, f"the ledger is consistent: {format_count(answer.accounts, 'account')}{holds}"
        )


def check_gate(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the gate decides and is not switched off."""
    settings = context.settings
    checked = f"{settings.gate_socket}, {settings.gate_off}"
    if not settings.bank.enabled and not settings.gate.ask:
        yield make_skipped(checked, "the bank is disabled")
        return
    if os.path.exists(settings.gate_off):
        yield make_wrong(
            checked,
            f"{settings.gate_off} exists, so the plugin admits every job without asking",
            f"rm {settings.gate_off}",
            name=os.path.basename(settings.gate_off),
        )
    state = GateClient(settings.state_dir, _GATE_S).get_status()
    if not state.deciding and not settings.gate.ask:
        yield make_wrong(
            checked,
            f"not deciding: {state.why}; the outage policy {settings.gate.policy} applies",
            "journalctl -u steward -p warning",
        )
    elif settings.gate.ask:
        yield make_ok(checked, f"asks the gate at {settings.gate.ask}")
    else:
        yield make_ok(checked, f"deciding, with {format_count(state.holds, 'open hold')}")


def check_remote_bank(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that a remote myBRC server answers and its balances are recent."""
    from steward.extensions.mybrc import (
        MybrcClient,
        RemoteFailed,
        RemoteRejected,
        RemoteUnavailable,
    )

    url = context.settings.bank.remote.url
    if not context.settings.bank.enabled or not url:
        yield make_skipped("[bank.remote] url", "no remote myBRC server is configured")
        return
    if not context.is_root and context.uid != context.steward_uid:
        yield make_skipped(url, "only Steward's user can read its token: run the check as root")
        return
    client = MybrcClient(context.settings)
    try:
        client.check_access()
    except (RemoteUnavailable, RemoteFailed, RemoteRejected) as error:
        yield make_wrong(
            url,
            f"{error}; charges and holds wait in the outbox",
            "check [bank.remote] in the output of: steward config show",
        )
    else:
        yield make_ok(url, "it answers")
        if context.settings.bank.remote.balances:
            yield _check_remote_balances(context.settings, url)
    finally:
        client.close()


def _check_remote_balances(settings: Settings, url: str) -> CheckFinding:
    """Check the age of the balances from the remote server."""
    at_us = GateClient(settings.state_dir, _GATE_S).get_status().remote_at_us
    age_s = time.time() - at_us / 1e6
    if at_us and age_s <= settings.bank.remote.balance_age_s:
        return make_ok(url, f"the oldest balance is {age_s:.0f} s old")
    problem = f"the last balance is {age_s:.0f} s old" if at_us else "no balance is known"
    return make_wrong(
        url,
        f"{problem}: the outage policy {settings.gate.policy} applies to such accounts",
        "journalctl -u steward -p warning",
    )


check_prices = make_cluster_check(_PRICES, _check_prices)
