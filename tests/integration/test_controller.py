"""``steward controller``: real processes, munged and certificates, killed at random.

``STEWARD_CONTROLLER_SEED`` repeats the instants of an earlier run.
"""

import os
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import msgspec
import pytest
from controllers import (
    Answer,
    Controller,
    MakeMunged,
    Munged,
    Relay,
    controller_settings,
    make_munged,
    said,
    serve_settings,
)
from file_tree import files_below
from job_submission import PATIENCE, wait_until
from spool_daemon import (
    Daemon,
    archived,
    assert_kept,
    chance_of,
    children_of,
    journalled,
    play,
    stored,
)

import storm
from harness.forwarders import script_row
from servers.authority import Authority
from servers.server import free_port
from steward.core.config import Settings
from steward.core.errors import PermissionRefused, Unavailable
from steward.core.munge import Munge, MungeUnavailable
from steward.core.section import TlsSettings
from steward.extensions.controllers import wire
from steward.extensions.controllers.admission import MungeAuthenticator
from steward.extensions.controllers.forwarder import ReceiverLink
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.slurm.settings import ClusterSettings

__all__ = ["make_munged"]

HERE = ("127.0.0.1",)
LISTENING = "listening for controllers at"


def cluster_of(munged: Munged, *controllers: str) -> ClusterSettings:
    return ClusterSettings(munge_socket=munged.socket, controllers=controllers or HERE)


def test_scripts_are_archived_elsewhere(fast: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    settings = controller_settings(fast / "ctl1", port, fast / "spool", munged.socket)
    with Daemon(serve, fast / "serve") as steward, Controller(settings, fast / "ctl1") as ctl1:
        play(str(fast / "spool"), range(1, 51)).wait(30)
        steward.wait(lambda: steward.is_quiet(50))
        wait_until(lambda: ctl1.status("forward.c1")[0] == "running", 10.0)
        # The controller removes bytes once the receiver has them.
        wait_until(lambda: stored(settings) == set(), 20.0)
        assert (ctl1.stop(), steward.stop()) == (0, 0)
    assert_kept(serve, range(1, 51))
    assert not (fast / "ctl1" / "state" / "archive").exists()
    assert not (fast / "ctl1" / "state" / "jobs.db").exists()


def test_what_is_captured_waits_until_steward_is_there(fast: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    settings = controller_settings(fast / "ctl1", port, fast / "spool", munged.socket)
    with Controller(settings, fast / "ctl1") as ctl1:
        play(str(fast / "spool"), range(1, 21)).wait(30)
        ctl1.wait(lambda: len(journalled(settings)) == 20)
        ctl1.wait(lambda: ctl1.status("forward.c1")[0] == "waiting")
        ctl1.wait(lambda: "cannot reach" in ctl1.status("forward.c1")[1])
        for job_id in range(1, 21):
            storm.remove_job(str(fast / "spool"), job_id)
        with Daemon(serve, fast / "serve") as steward:
            steward.wait(lambda: steward.is_quiet(20), 60.0)
            steward.stop()
    assert_kept(serve, range(1, 21))


def test_a_host_reports_only_for_its_own_cluster(fast: Path, make_munged: MakeMunged) -> None:
    """Two clusters have different keys and the same job ids."""
    one, two, port = make_munged(), make_munged(), free_port()
    clusters = {"c1": cluster_of(one), "c2": cluster_of(two, "localhost")}
    serve = serve_settings(fast / "serve", port, clusters)
    first = controller_settings(fast / "one", port, fast / "spool1", one.socket)
    second = controller_settings(fast / "two", port, fast / "spool2", two.socket, cluster="c2")
    thief = controller_settings(fast / "thief", port, fast / "spool3", one.socket, cluster="c2")
    for spool in ("spool1", "spool2", "spool3"):
        storm.write_job(str(fast / spool), 1)
    storm.write_job(str(fast / "spool3"), 666)
    with (
        Daemon(serve, fast / "serve") as steward,
        Controller(first, fast / "one"),
        Controller(second, fast / "two"),
        Controller(thief, fast / "thief") as robbing,
    ):
        said(
            robbing,
            "does not accept this host for cluster c2: the MUNGE credential was made with another",
        )
        steward.wait(lambda: "cluster c1" in steward.log() and "cluster c2" in steward.log())
        steward.wait(lambda: steward.is_quiet(1))
        wait_until(lambda: len(files_below(fast / "serve" / "archive", "1-*.sh")) == 2, 30.0)
        robbing.wait(lambda: robbing.status("forward.c2")[0] == "waiting")
    assert journalled(serve) == {1}


def test_a_host_that_is_no_controller_is_refused(fast: Path, make_munged: MakeMunged) -> None:
    """A compute node has the cluster's key, too."""
    controller, port = make_munged(), free_port()
    node = make_munged("127.0.0.9", controller.key)
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(controller)})
    settings = controller_settings(fast / "node", port, fast / "spool", node.socket)
    storm.write_job(str(fast / "spool"), 1)
    with Daemon(serve, fast / "serve"), Controller(settings, fast / "node") as daemon:
        said(daemon, "was made on 127.0.0.9, which is not in 'controllers'")
    assert journalled(serve) == set()


def witnesses(
    ours: Munged, theirs: Munged, uid: int = -1
) -> tuple[MungeAuthenticator, MungeAuthenticator]:
    """Return the authenticators of a controller and of the receiver; both accept this uid."""
    uids = frozenset({os.geteuid() if uid < 0 else uid})
    return (
        MungeAuthenticator(Munge(ours.socket), uids),
        MungeAuthenticator(Munge(theirs.socket), uids, frozenset(HERE)),
    )


def test_a_credential_counts_once_and_for_its_place_alone(make_munged: MakeMunged) -> None:
    munged = make_munged()
    says, hears = witnesses(munged, munged)
    head = wire.RequestHead(
        path=wire.EVENTS, origin="s:1", cluster="c1", stream="a" * 64, number=1, digest="b" * 64
    )
    statement = head.build_statement()
    good = says.sign(statement)
    hears.check(statement, good)
    with pytest.raises(PermissionRefused, match="was used before"):
        hears.check(statement, good)
    for name, value in {"number": 2, "stream": "c" * 64, "digest": "d" * 64}.items():
        other = msgspec.structs.replace(head, **{name: value})
        with pytest.raises(PermissionRefused, match="does not match the message: it signs another"):
            hears.check(other.build_statement(), says.sign(statement))
    with pytest.raises(PermissionRefused, match="does not match the message: it signs another"):
        # A message of the receiver itself proves no other sender.
        hears.check(statement, hears.sign(head.build_reply_statement("durable", b"")))
    for junk in ("", "Munge ", "MUNGE:", "MUNGE:AwQFAAA=:", "-h", "A" * 20_000, "\xff\n"):
        for credential in (junk, f"Munge {junk}"):
            with pytest.raises(PermissionRefused):
                hears.check(statement, credential)


def test_a_credential_of_another_user_or_key_is_refused(make_munged: MakeMunged) -> None:
    munged, other = make_munged(), make_munged()
    says, hears = witnesses(munged, munged, uid=4_000_000)
    with pytest.raises(
        PermissionRefused, match=f"is from uid {os.geteuid()}, which is not allowed"
    ):
        hears.check(b"x", says.sign(b"x"))
    says, hears = witnesses(munged, other)
    with pytest.raises(PermissionRefused, match="another key"):
        hears.check(b"x", says.sign(b"x"))


def test_a_munged_that_is_away_is_waited_for(tmp_path: Path) -> None:
    nowhere = Munge(str(tmp_path / "none"))
    with pytest.raises(MungeUnavailable):
        nowhere.encode(b"x")
    with pytest.raises(MungeUnavailable):
        nowhere.decode(b"MUNGE:AwQFAAA=:")


def link_to(relay: Relay, munged: Munged) -> ReceiverLink:
    return ReceiverLink(ForwardSettings(to=f"127.0.0.1:{relay.port}"), "c1", munged.socket)


def test_a_batch_is_no_use_in_another_stream(fast: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    says, _ = witnesses(munged, munged)
    with Daemon(serve, fast / "serve") as steward, Relay(port) as relay:
        said(steward, LISTENING)
        link = link_to(relay, munged)
        assert link.send_batch([script_row(1)]).verdict == "durable"
        for path, headers, body in relay.requests:
            status, _headers, content = relay.post(path, headers, body)
            assert (status, wire.decode_reply(content).verdict) == (403, "refused")
            assert "was used before" in wire.decode_reply(content).detail
        # An unused credential for the second batch of the first stream.
        other = link_to(relay, munged)
        assert other.send_batch([]).verdict == "durable"
        (_, first, _), (_, second, _) = (relay.requests[1], relay.requests[3])
        head, _ = wire.parse_head(wire.EVENTS, encoded({**first, "steward-number": "2"}))
        credential = says.sign(head.build_statement())
        forged = {**first, "steward-number": "2", "authorization": credential}
        moved = {**forged, "steward-stream": second["steward-stream"]}
        status, _headers, content = relay.post(wire.EVENTS, moved, relay.requests[1][2])
        assert (status, wire.decode_reply(content).verdict) == (403, "refused")
        assert "does not match the message: it signs another" in wire.decode_reply(content).detail
        # With an address that the controller did not mean, neither.
        relay.host = "steward.example.org:6825"
        with pytest.raises(PermissionRefused, match="does not match the message: it signs another"):
            link.send_batch([script_row(2)])
    assert journalled(serve) == {1}


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), text.encode()) for name, text in headers.items()]


@pytest.mark.parametrize(
    "forgery", ["none", "reflected", "before", "stream", "body", "digest", "verdict"]
)
def test_an_answer_to_anything_else_is_not_believed(
    fast: Path, make_munged: MakeMunged, forgery: str
) -> None:
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    with Daemon(serve, fast / "serve") as steward, Relay(port) as relay:
        said(steward, LISTENING)
        kept: list[Answer] = []

        def keep(answer: Answer) -> Answer:
            """Store the answer, and reply to the controller that it should retry."""
            kept.append(answer)
            return 503, {}, wire.encode_message(wire.ReceiverReply(verdict="later"))

        def swap(answer: Answer) -> Answer:
            status, headers, body = answer
            if forgery == "none":
                return status, {}, body
            if forgery == "reflected":
                request = relay.requests[-1][1]
                return status, {**headers, wire.REPLY_CREDENTIAL: request["authorization"]}, body
            if forgery in ("body", "verdict"):
                refused = [] if forgery == "body" else [(0, "x")]
                reply = wire.ReceiverReply(verdict="durable", refused=refused)
                return status, headers, wire.encode_message(reply)
            return kept[0]

        rows = [script_row(1)]
        if forgery == "body":
            # The receiver refuses it, and the relay says that it is durable.
            rows = [script_row(1, cluster="c2")]
        link, other = link_to(relay, munged), link_to(relay, munged)
        relay.alter = keep
        if forgery in ("before", "digest"):
            assert_later(link, [script_row(2)] if forgery == "digest" else [])
        if forgery == "before":
            # The same batch again is believed, and is the first one.
            relay.alter = lambda answer: answer
            link.send_batch([])
            rows = []
        if forgery == "stream":
            assert_later(other, rows)
        relay.alter = swap
        if forgery == "digest":
            # The receiver has another batch of this number; this one goes into another stream.
            relay.alter = lambda answer: answer if answer[0] == 409 else swap(answer)
        with pytest.raises(PermissionRefused, match="credential"):
            link.send_batch(rows)
        relay.alter = lambda answer: answer
        link.close()
        assert link.send_batch([script_row(3)]).verdict == "durable"


def assert_later(link: ReceiverLink, rows: list[wire.ForwardedEvent]) -> None:
    with pytest.raises(Unavailable, match="is not ready"):
        link.send_batch(rows)


def test_a_munged_that_restarts_costs_nothing(fast: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    settings = controller_settings(fast / "ctl1", port, fast / "spool", munged.socket)
    with Daemon(serve, fast / "serve") as steward, Controller(settings, fast / "ctl1") as ctl1:
        storm.write_job(str(fast / "spool"), 1)
        steward.wait(lambda: steward.is_quiet(1))
        munged.close()
        play(str(fast / "spool"), range(2, 12)).wait(30)
        ctl1.wait(lambda: ctl1.status("forward.c1")[0] == "waiting")
        ctl1.wait(lambda: len(journalled(settings)) == 11)
        munged.start()
        steward.wait(lambda: steward.is_quiet(11), 60.0)
        assert "reports for cluster c1" in steward.log()
    assert_kept(serve, range(1, 12))


def test_a_munged_that_forgot_its_credentials_lets_nothing_in_twice(
    fast: Path, make_munged: MakeMunged
) -> None:
    """A restarted munged accepts old credentials again; stream and number still reject repeats."""
    munged, port = make_munged(), free_port()
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    with Daemon(serve, fast / "serve") as steward, Relay(port) as relay:
        said(steward, LISTENING)
        link = link_to(relay, munged)
        for job_id in (1, 2):
            assert link.send_batch([script_row(job_id)]).verdict == "durable"
        munged.close()
        munged.start()
        verdicts = [
            wire.decode_reply(relay.post(*request)[2]).verdict for request in list(relay.requests)
        ]
        # A stream of the first controller, a past batch, and a stored one.
        assert verdicts == ["durable", "restart", "durable"]
        assert link.send_batch([script_row(3)]).verdict == "durable"
        assert [headers["steward-number"] for _, headers, _ in relay.requests] == list("0123")
        steward.wait(lambda: steward.is_quiet(3))
    assert journalled(serve) == {1, 2, 3}


def test_a_munged_that_hangs_keeps_no_other_cluster_waiting(
    fast: Path, make_munged: MakeMunged
) -> None:
    munged, port = make_munged(), free_port()
    path = str(fast / "hangs")
    with socket.socket(socket.AF_UNIX) as hanging, ThreadPoolExecutor(12) as pool:
        hanging.bind(path)
        hanging.listen(64)
        hung = ClusterSettings(munge_socket=path, controllers=HERE)
        serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged), "c2": hung})
        with Daemon(serve, fast / "serve") as steward, Relay(port) as relay:
            said(steward, LISTENING)
            link = link_to(relay, munged)
            assert link.send_batch([script_row(1)]).verdict == "durable"
            headers = {**relay.requests[0][1], "steward-cluster": "c2"}
            waiting = [pool.submit(relay.post, wire.HELLO, headers, bytes(32)) for _ in range(12)]
            wait_until(lambda: sum(answer.done() for answer in waiting) >= 8, 20.0)
            # Four requests of one address wait, the others are rejected; the streams of c1
            # continue.
            assert link.send_batch([script_row(2)]).verdict == "durable"
            link.close()
            assert link.send_batch([script_row(3)]).verdict == "durable"
            assert [answer.done() for answer in waiting].count(False) > 0
            contents = [answer.result()[2] for answer in waiting]
            assert {wire.decode_reply(content).verdict for content in contents} == {"later"}
    assert journalled(serve) == {1, 2, 3}


def test_certificates_in_place_of_munge(fast: Path) -> None:
    port = free_port()
    authority = Authority(fast / "ca")
    certificate, key = authority.certificate("DNS:localhost", "IP:127.0.0.1")
    serve = serve_settings(
        fast / "serve",
        port,
        {"c1": ClusterSettings(controllers=("ctl1.example.org",))},
        ReceiveSettings(
            tls=TlsSettings(
                certificate_file=certificate, key_file=key, client_ca_file=authority.file
            )
        ),
    )

    def forward(name: str) -> ForwardSettings:
        own, own_key = authority.certificate(name)
        return ForwardSettings(
            tls=TlsSettings(ca_file=authority.file, certificate_file=own, key_file=own_key)
        )

    good = controller_settings(
        fast / "ctl1", port, fast / "spool", forward=forward("DNS:ctl1.example.org")
    )
    bad = controller_settings(
        fast / "ctl9", port, fast / "spool9", forward=forward("DNS:ctl9.example.org")
    )
    storm.write_job(str(fast / "spool9"), 9)
    with (
        Daemon(serve, fast / "serve") as steward,
        Controller(good, fast / "ctl1"),
        Controller(bad, fast / "ctl9") as stranger,
    ):
        play(str(fast / "spool"), range(10, 40)).wait(30)
        steward.wait(lambda: steward.is_quiet(30))
        said(stranger, "ctl9.example.org, not one of the 'controllers'")
    assert_kept(serve, range(10, 40))


def test_munge_within_tls(fast: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    authority = Authority(fast / "ca")
    certificate, key = authority.certificate("IP:127.0.0.1")
    serve = serve_settings(
        fast / "serve",
        port,
        {"c1": cluster_of(munged)},
        ReceiveSettings(tls=TlsSettings(certificate_file=certificate, key_file=key)),
    )
    settings = controller_settings(
        fast / "ctl1",
        port,
        fast / "spool",
        munged.socket,
        forward=ForwardSettings(tls=TlsSettings(ca_file=authority.file)),
    )
    with Daemon(serve, fast / "serve") as steward, Controller(settings, fast / "ctl1"):
        play(str(fast / "spool"), range(1, 11)).wait(30)
        steward.wait(lambda: steward.is_quiet(10))
    assert_kept(serve, range(1, 11))


def kill_one(daemons: list[Daemon], chance: Random) -> None:
    """Kill a controller or one of its workers, within the next half second."""
    time.sleep(chance.uniform(0.0, 0.5))
    daemon = chance.choice(daemons)
    parts = daemon.parts()
    if parts and chance.random() < 0.4:
        victim = chance.choice(parts)
        if victim in children_of(daemon.pid):
            os.kill(victim, signal.SIGKILL)
        return
    daemon.kill()
    daemon.start()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "total"), [(14, 300), pytest.param(100, 2000, marks=pytest.mark.long)]
)
def test_two_controllers_of_one_spool_and_kills_at_random(
    fast: Path, make_munged: MakeMunged, kills: int, total: int
) -> None:
    """Active and backup controller see one spool; both and Steward are killed in a storm."""
    chance = chance_of("STEWARD_CONTROLLER_SEED")
    munged, port = make_munged(), free_port()
    spool = fast / "spool"
    serve = serve_settings(fast / "serve", port, {"c1": cluster_of(munged)})
    pair = [
        controller_settings(fast / name, port, spool, munged.socket) for name in ("ctl1", "ctl2")
    ]
    jobs = range(1, total + 1)
    forgotten: set[int] = set()
    generator = play(str(spool), jobs, f"--rate={total / (kills * 0.7)}", "--burst=20")
    with (
        Daemon(serve, fast / "serve") as steward,
        Controller(pair[0], fast / "ctl1") as active,
        Controller(pair[1], fast / "ctl2") as backup,
    ):
        try:
            for _ in range(kills):
                kill_one([steward, active, backup], chance)
                forget_some(serve, pair, spool, forgotten, chance)
            assert generator.wait(PATIENCE * 60) == 0
        finally:
            generator.kill()
            generator.wait()
        steward.wait(lambda: steward.is_quiet(total), 90.0)
        active.wait(active.is_forwarded, 60.0)
        backup.wait(backup.is_forwarded, 60.0)
        assert [daemon.stop() for daemon in (active, backup, steward)] == [0, 0, 0]
    print(f"{len(forgotten)} jobs had left the spool before the end", file=sys.stderr)
    assert_kept(serve, jobs)
    assert journalled(serve) == set(jobs)
    assert set(archived(serve)) == set(jobs)


def forget_some(
    serve: Settings, pair: list[Settings], spool: Path, forgotten: set[int], chance: Random
) -> None:
    """Remove half of the jobs that any of the three has stored, as slurmctld does."""
    durable = set().union(*(journalled(of) | stored(of) for of in (serve, *pair)))
    for job_id in durable - forgotten:
        if chance.random() < 0.5:
            shutil.rmtree(spool / f"hash.{job_id % 10}" / f"job.{job_id}")
            forgotten.add(job_id)
