import signal

from steward.sandbox.cluster import SandboxProcess


def test_what_has_not_begun_ends_before_it_does() -> None:
    with SandboxProcess(["sleep", "1000"], start_timeout_s=0.05) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        process.kill()
