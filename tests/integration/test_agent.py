"""``steward agent`` and what takes it in: real ones, with real munged, killed at will.

``STEWARD_AGENT_SEED`` repeats the instants of an earlier run, ``STEWARD_AGENT_PYTHON`` is the
Python that agents run with.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from controllers import Controller, Munged, controller_settings, said, serve_settings
from running import Daemon, chance_of, settings_in
from steward_daemon import Daemon as InSandbox
from submitting import wait_until

from servers.process import free_port
from steward.agent import agent
from steward.capture.nodes.folding import KINDS
from steward.capture.nodes.heard import Heard
from steward.config import ClusterSettings, NodesSettings, Settings
from steward.errors import Refused
from steward.events import TASK_EXIT, Event
from steward.journal import JournalReader
from steward.munge import library
from steward.munge.munged import Claim, Munge, MungeUnavailable
from steward.native import building, installing
from steward.sandbox import Sandbox, SandboxSpec
from steward.settings.file import Loaded, render

AGENT = [os.environ.get("STEWARD_AGENT_PYTHON", sys.executable), "-I", str(agent.__file__)]
NODE = "localhost"
"""Where Slurm is not asked a node is looked for under its own name."""

MakeMunged = Callable[..., Munged]


@pytest.fixture
def make_munged(tmp_path: Path) -> Iterator[MakeMunged]:
    made: list[Munged] = []

    def make(origin: str = "127.0.0.1", key: bytes = b"") -> Munged:
        made.append(Munged(tmp_path / f"munged{len(made)}", origin, key))
        return made[-1]

    yield make
    for munged in made:
        munged.close()


def lines(numbers: range, node: str = NODE) -> bytes:
    """A thousand tasks to a step."""
    now = int(time.time() * 1e6)
    return b"".join(
        b'{"v":1,"k":"task","t":%d,"j":%d,"n":"%s","s":"%d","l":%d,"id":%d,"pid":%d,'
        b'"st":0,"ut":1000,"sy":1000,"rss":5000000,"minf":100,"vsw":10}\n'
        % (now, 7, node.encode(), n // 1000, 1_772_366_400_000_000, n % 1000, n + 1)
        for n in numbers
    )


def put(spool: Path, data: bytes, node: str = NODE) -> None:
    spool.mkdir(exist_ok=True)
    with (spool / f"{node}.log").open("ab") as file:
        file.write(data)


def run_agent(
    spool: Path, port: int, socket: str, *more: str
) -> "subprocess.CompletedProcess[str]":
    words = [*AGENT, "--spool", str(spool), "--to", f"127.0.0.1:{port}", "--munge-socket", socket]
    return subprocess.run(
        [*words, "--limit", "0", *more], capture_output=True, text=True, timeout=300, check=False
    )


def hearing(directory: Path, port: int, munged: Munged, behind_nat: bool = False) -> Settings:
    of = ClusterSettings(slurm=False, spool=str(directory / "spool"), munge_socket=munged.socket)
    nodes = NodesSettings(listen=f"127.0.0.1:{port}", behind_nat=behind_nat)
    return settings_in(directory, cluster={"c1": of}, nodes=nodes)


def events_of(settings: Settings) -> list[Event]:
    reader = JournalReader(settings.state_dir)
    found: list[Event] = []
    try:
        while True:
            some, _ = reader.read(found[-1].id if found else 0, set(KINDS), 1000)
            if not some:
                return found
            found += some
    finally:
        reader.close()


def tasks_of(settings: Settings) -> list[int]:
    """The numbers of all tasks that were told of, those that were told twice as well."""
    return [
        int(event.body.step) * 1000 + task.task
        for event in events_of(settings)
        if event.kind == TASK_EXIT
        for task in event.body.tasks
    ]


def test_a_days_backlog_comes_in_pieces(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    put(tmp_path / "lines", lines(range(100_000)))
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        began = time.monotonic()
        done = run_agent(tmp_path / "lines", port, munged.socket)
        assert (done.returncode, done.stderr) == (0, "")
        print(f"100,000 lines in {time.monotonic() - began:.1f} s")
        assert sorted(tasks_of(settings)) == list(range(100_000))
        daemon.stop()
    (node,) = Heard(settings.state_dir).nodes()
    assert (node.node, node.cluster) == (NODE, "c1")
    assert node.sequence == agent.Place(str(tmp_path / "lines" / f"{NODE}.place")).sequence
    assert len([e for e in events_of(settings) if e.kind == TASK_EXIT]) < 250


def test_who_may_not_report(tmp_path: Path, make_munged: MakeMunged) -> None:
    here, port = make_munged(), free_port()
    elsewhere = make_munged("127.0.0.9", here.key)
    strange = make_munged()
    settings = hearing(tmp_path, port, here)
    put(tmp_path / "lines", lines(range(10)))
    put(tmp_path / "others", lines(range(10), "127.0.0.9"), "127.0.0.9")
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        for socket, what in (
            (elsewhere.socket, "was made on 127.0.0.9, and node localhost is at 127.0.0.1"),
            (strange.socket, "was made with another key"),
        ):
            done = run_agent(tmp_path / "lines", port, socket)
            assert done.returncode == 1
            assert what in done.stderr
            assert done.stderr.count("\n") == 1
        assert events_of(settings) == []
        # With the cluster's key munged says whatever address it is told to.
        done = run_agent(tmp_path / "others", port, elsewhere.socket)
        assert done.returncode == 1
        assert "the connection comes from 127.0.0.1 (see [nodes] behind_nat), and node " in (
            done.stderr
        )
        assert events_of(settings) == []
        assert run_agent(tmp_path / "lines", port, here.socket).returncode == 0
        body = lines(range(10), "127.0.0.9")
        assert post(port, elsewhere, "127.0.0.9", body)[0] == 403
        assert post(port, elsewhere, "127.0.0.9", body, source="127.0.0.9")[0] == 200
    assert len(tasks_of(settings)) == 20


def test_who_may_report_where_addresses_say_nothing(
    tmp_path: Path, make_munged: MakeMunged
) -> None:
    here, port = make_munged(), free_port()
    elsewhere = make_munged("127.0.0.9", here.key)
    settings = hearing(tmp_path, port, here, behind_nat=True)
    put(tmp_path / "others", lines(range(10), "127.0.0.9"), "127.0.0.9")
    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        assert run_agent(tmp_path / "others", port, here.socket).returncode == 1
        assert run_agent(tmp_path / "others", port, elsewhere.socket).returncode == 0
    assert len(tasks_of(settings)) == 10


def post(
    port: int, munged: Munged, node: str, body: bytes, source: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send a batch from an address of ours; what is answered."""
    head = json.dumps({"v": 1, "node": node, "sequence": 1, "place": "a"})
    claim = agent.claim_of(node, "", 1, agent.digest_of(head.encode(), body))
    credential = Munge(munged.socket).encode(claim).decode()
    connection = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=60, source_address=(source, 0)
    )
    headers = {"Steward-Batch": head, "Steward-Credential": credential}
    connection.request("POST", agent.PATH, body, headers)
    answer = connection.getresponse()
    status, text = answer.status, answer.read()
    connection.close()
    return status, text


def test_an_answer_of_somebody_else_is_not_believed(
    tmp_path: Path, make_munged: MakeMunged
) -> None:
    """Lines are let go of because of it: whoever is at the port has to be Steward."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    munged, strange = make_munged(), make_munged()
    recorded: list[str] = []

    class Impostor(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            digest = agent.digest_of(self.headers["Steward-Batch"].encode(), body)
            said = f"durable {digest}\n".encode()
            recorded.append(self.headers["Steward-Credential"])
            credentials = [
                "",
                self.headers["Steward-Credential"],
                Munge(strange.socket).encode(agent.answer_claim_of(digest, said)).decode(),
                Munge(munged.socket).encode(agent.answer_claim_of("0" * 64, said)).decode(),
            ]
            self.send_response(200)
            self.send_header("Steward-Credential", credentials[len(recorded) - 1])
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    put(tmp_path / "lines", lines(range(10)))
    server = HTTPServer(("127.0.0.1", 0), Impostor)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        for _ in range(4):
            done = run_agent(tmp_path / "lines", server.server_address[1], munged.socket)
            assert done.returncode == 1, done.stderr
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert len(recorded) == 4
    assert agent.Place(str(tmp_path / "lines" / f"{NODE}.place")).sequence == 0


def test_it_comes_again_when_it_is_asked_to(tmp_path: Path, make_munged: MakeMunged) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    munged = make_munged()
    asked: list[float] = []

    class Busy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(time.monotonic())
            body = self.rfile.read(int(self.headers["Content-Length"]))
            digest = agent.digest_of(self.headers["Steward-Batch"].encode(), body)
            said = f"durable {digest}\n".encode()
            self.send_response(503 if len(asked) == 1 else 200)
            self.send_header("Retry-After", "2")
            claim = agent.answer_claim_of(digest, said)
            self.send_header("Steward-Credential", Munge(munged.socket).encode(claim).decode())
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    put(tmp_path / "lines", lines(range(10)))
    server = HTTPServer(("127.0.0.1", 0), Busy)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        port = server.server_address[1]
        done = run_agent(tmp_path / "lines", port, munged.socket, "--limit", "200")
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[1] - asked[0] >= 2.0


@pytest.mark.parametrize("has_library", [True, False])
def test_munge_by_its_library_or_its_commands(
    make_munged: MakeMunged, monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    if not has_library:
        monkeypatch.setattr(library, "loaded", lambda: None)
    elif library.loaded() is None:
        pytest.skip("there is no libmunge")
    here, strange = Munge(make_munged("127.0.0.9").socket), Munge(make_munged().socket)
    payload = bytes(range(1, 256)) * 4
    credential = here.encode(payload)
    assert here.decode(credential) == Claim(os.geteuid(), "127.0.0.9", payload)
    with pytest.raises(Refused, match="was used before"):
        here.decode(credential)
    with pytest.raises(Refused, match="with another key"):
        here.decode(strange.encode(b"a"))
    for none in (b"", b"MUNGE:", b"MUNGE:AwQDAA:", b"x" * 20_000):
        with pytest.raises(Refused):
            here.decode(none)
    with pytest.raises(MungeUnavailable, match="makes no credential"):
        Munge("/nonexistent/munge").encode(b"a")
    with pytest.raises(MungeUnavailable, match="opens no credential"):
        Munge("/nonexistent/munge").decode(credential)


def test_a_batch_that_is_played_again_is_refused(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    body = lines(range(5))
    head = json.dumps({"v": 1, "node": NODE, "sequence": 1, "place": "a", "nonce": "b"})
    digest = agent.digest_of(head.encode(), body)
    claim = agent.claim_of(NODE, "", 1, digest)

    def post(credential: bytes, data: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Steward-Batch": head, "Steward-Credential": credential.decode()}
        connection.request("POST", agent.PATH, data, headers)
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        connection.close()
        return status, text

    with Daemon(settings, tmp_path) as daemon:
        said(daemon, "listening for nodes")
        credential = Munge(munged.socket).encode(claim)
        assert post(credential, body) == (200, f"durable {digest}\n".encode())
        assert post(credential, body)[1].startswith(b"the MUNGE credential was used before")
        # The same one with a credential of its own is harmless.
        assert post(Munge(munged.socket).encode(claim), body)[0] == 200
        assert post(Munge(munged.socket).encode(claim), lines(range(5, 10)))[0] == 403
    assert sorted(tasks_of(settings)) == list(range(5))


def write_on(spool: Path, total: int, chance: Random, over: threading.Event) -> None:
    for number in range(total):
        put(spool, lines(range(number, number + 1)))
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0.0, 0.02))
    over.set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kills", "total"), [(15, 2000), pytest.param(150, 20_000, marks=pytest.mark.long)]
)
def test_kills_at_random_lose_nothing(
    tmp_path: Path, make_munged: MakeMunged, kills: int, total: int
) -> None:
    """The agent is killed at any instant, and Steward now and then, while lines are written."""
    chance = chance_of("STEWARD_AGENT_SEED")
    munged, port = make_munged(), free_port()
    settings = hearing(tmp_path, port, munged)
    spool = tmp_path / "lines"
    put(spool, b"")
    over = threading.Event()
    writer = threading.Thread(target=write_on, args=(spool, total, Random(chance.random()), over))
    words = [*AGENT, "--spool", str(spool), "--to", f"127.0.0.1:{port}"]
    words += ["--munge-socket", munged.socket, "--limit", "1", "--rotate-bytes", "20000"]
    with Daemon(settings, tmp_path) as daemon:
        writer.start()
        killed = 0
        while killed < kills or not over.is_set():
            running = subprocess.Popen(
                [*words, "--resident", "--every", "0.01"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(chance.uniform(0.0, 0.5))
            running.send_signal(signal.SIGKILL)
            running.wait(30)
            killed += 1
            if chance.random() < 0.1:
                daemon.kill()
                daemon.start()
        writer.join()
        said(daemon, "listening for nodes")
        wait_until(lambda: run_agent(spool, port, munged.socket).returncode == 0, 60.0)
        found = tasks_of(settings)
    print(f"{killed} kills, {len(found)} tasks told of {total}", file=sys.stderr)
    assert sorted(set(found)) == list(range(total))
    keys = [event.key for event in events_of(settings)]
    assert len(keys) == len(set(keys))
    assert {event.kind for event in events_of(settings)} == {TASK_EXIT}


def test_by_way_of_a_controller(tmp_path: Path, make_munged: MakeMunged) -> None:
    munged, port, nodes_port = make_munged(), free_port(), free_port()
    of = ClusterSettings(munge_socket=munged.socket, controllers=("127.0.0.1",))
    serve = serve_settings(tmp_path / "serve", port, {"c1": of})
    settings = msgspec.structs.replace(
        controller_settings(tmp_path / "ctl", port, tmp_path / "spool", munged.socket),
        nodes=NodesSettings(listen=f"127.0.0.1:{nodes_port}"),
    )
    put(tmp_path / "lines", lines(range(3000)) + b"garbage\n")
    with (
        Daemon(serve, tmp_path / "serve") as steward,
        Controller(settings, tmp_path / "ctl") as ctl,
    ):
        said(ctl, "listening for nodes")
        assert run_agent(tmp_path / "lines", nodes_port, munged.socket).returncode == 0
        steward.wait(lambda: len(set(tasks_of(serve))) == 3000)
        steward.wait(lambda: any(event.body.why == "garbled" for event in gaps_of(serve)))
        ctl.wait(ctl.is_forwarded)


def gaps_of(settings: Settings) -> list[Event]:
    return [event for event in events_of(settings) if event.kind == "node.gap"]


@pytest.mark.matrix
def test_on_a_real_cluster(sandbox: Sandbox, tmp_path: Path) -> None:
    """Slurm is asked where its nodes are; only root of a node speaks for it."""
    home = Path(sandbox.directory) / f"agent-{os.getpid()}"
    port = free_port()
    daemon = InSandbox(sandbox, home, slurm={"munge_socket": sandbox.plan.munge_socket})
    daemon.settings = msgspec.structs.replace(
        daemon.settings, nodes=NodesSettings(listen=f"127.0.0.1:{port}")
    )
    daemon.config.write_text(render(Loaded(daemon.settings)))
    spool = home / "lines"
    node, user = "node1", next(iter(sandbox.users))
    put(spool, lines(range(100), node), node)
    put(spool, lines(range(100), "n999"), "n999")
    own = home / "own"
    put(own, lines(range(100), node), node)
    for path in (own, own / f"{node}.log"):
        os.chown(path, sandbox.users[user].uid, -1)
    rest = ["--to", f"127.0.0.1:{port}", "--limit", "0"]
    rest += ["--munge-socket", sandbox.plan.munge_socket]
    nodes = sandbox.run(["scontrol", "-o", "show", "node"]).stdout
    assert f"NodeName={node} " in nodes
    daemon.start()
    try:
        wait_until(lambda: "listening for nodes" in daemon.log())
        theirs = sandbox.run([*AGENT, "--spool", str(own), *rest], user=user, check=False)
        assert theirs.returncode == 1
        assert f"uid {sandbox.users[user].uid}'s, not root's" in theirs.stderr
        ours = sandbox.run([*AGENT, "--spool", str(spool), "--node", node, *rest], check=False)
        assert (ours.returncode, ours.stderr) == (0, "")
        none = sandbox.run([*AGENT, "--spool", str(spool), "--node", "n999", *rest], check=False)
        assert none.returncode == 1
        assert "has no node 'n999'" in none.stderr
        assert sorted(tasks_of(daemon.settings)) == list(range(100))
    finally:
        daemon.close()


@pytest.mark.matrix
@pytest.mark.skipif(
    not shutil.which("cc") or not Path("/usr/include/slurm/spank.h").exists(),
    reason="needs a C compiler and Slurm's headers",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root")
def test_from_a_step_to_its_events(slurm_version: str) -> None:
    """Two nodes, four tasks each: the plugin's lines, one agent, and what comes of them."""
    stack = ("include {directory}/etc/plugstack.conf.d/*.conf",)
    spec = SandboxSpec(slurm=slurm_version, nodes=2, cpus=4, plugstack=stack)
    with Sandbox.up(spec) as cluster:
        directory, port = cluster.directory, free_port()
        built = building.build(f"{cluster.plan.root}/usr/include", f"{directory}/lib")
        spool = f"{directory}/shim"
        installing.install_shim(
            built,
            libdir=f"{directory}/lib",
            plugstack=f"{directory}/etc/plugstack.conf",
            spool=spool,
        )
        for name in cluster.status():
            if name.startswith("slurmd."):
                cluster.restart_service(name)
        wait_until(lambda: set(cluster.run(["sinfo", "-h", "-o", "%T"]).stdout.split()) == {"idle"})
        daemon = InSandbox(cluster, Path(directory) / "steward")
        daemon.settings = msgspec.structs.replace(
            daemon.settings,
            cluster={
                "box": msgspec.structs.replace(
                    daemon.settings.cluster["box"], munge_socket=cluster.plan.munge_socket
                )
            },
            nodes=NodesSettings(listen=f"127.0.0.1:{port}"),
        )
        daemon.config.write_text(render(Loaded(daemon.settings)))
        daemon.start()
        try:
            wait_until(lambda: "listening for nodes" in daemon.log())
            user = next(iter(cluster.users))
            ran = cluster.run(["srun", "-N2", "-n8", "sh", "-c", "exit 3"], user=user, check=False)
            assert ran.returncode == 3, ran.stderr
            words = [*AGENT, "--spool", spool, "--to", f"127.0.0.1:{port}", "--limit", "30"]
            words += ["--munge-socket", cluster.plan.munge_socket]

            def told() -> bool:
                cluster.run(words, check=False)
                return sum(e.kind == "step.end" for e in events_of(daemon.settings)) >= 2

            wait_until(told)
            events = events_of(daemon.settings)
        finally:
            daemon.close()
    assert [event for event in events if event.kind == "node.gap"] == []
    exits = [event.body for event in events if event.kind == TASK_EXIT and event.body.step == "0"]
    tasks = {task.task: task.status for body in exits for task in body.tasks}
    assert tasks == dict.fromkeys(range(8), 3 << 8)
    assert {body.node for body in exits} == {"node1", "node2"}
    starts = [e.body for e in events if e.kind == "step.start" and e.body.step == "0"]
    assert [(start.tasks, start.name) for start in starts] == [(4, "sh"), (4, "sh")]
