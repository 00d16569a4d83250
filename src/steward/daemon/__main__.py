"""Entry point of the daemon: ``python -m steward.daemon FILE [controller]``.

``steward serve``, ``steward controller`` and ``steward archive watch`` check everything and then
exec this with `exec_daemon`, because the command line's packages would cost each daemon process
memory.
"""

import os
import sys
from typing import NoReturn

from steward.core.errors import StewardError


def exec_daemon(config: str, *, controller: bool = False) -> NoReturn:
    """Replace this process by the daemon of a configuration file; the process id stays.

    Args:
        config: Path of the configuration file.
        controller: Whether to run only a controller's workers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Names in an archive are UTF-8, whatever the service manager's locale is.
    arguments = [sys.executable, "-X", "utf8", "-m", "steward.daemon", config]
    if controller:
        arguments.append("controller")
    os.execv(sys.executable, arguments)  # noqa: S606 - no shell is wanted


def main() -> int:
    """Run the daemon; return its exit code."""
    from steward.core.config.reader import load_settings
    from steward.daemon import serve

    config, *extra = sys.argv[1:]
    if extra:
        from steward.daemon.controller import make_controller_workers as make_workers
    else:
        from steward.daemon.workers import make_workers
    try:
        return serve.run_daemon(load_settings(config), lambda: load_settings(config), make_workers)
    except StewardError as error:
        print(f"steward: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
