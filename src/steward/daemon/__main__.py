"""The daemon without the command line, whose packages would cost each of its processes memory.

``steward serve``, ``steward controller`` and ``steward archive watch`` check
everything and then become this: ``python -m steward.daemon FILE [controller]``.
"""

import os
import sys
from typing import NoReturn

from steward.core.errors import StewardError


def become(config: str, *, controller: bool = False) -> NoReturn:
    """Turn this process into the daemon of a configuration file; its id stays the same.

    Args:
        config: The file's path.
        controller: Whether it is to run a controller's parts only.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Names in an archive are UTF-8, whatever the service manager's locale is.
    words = [sys.executable, "-X", "utf8", "-m", "steward.daemon", config]
    if controller:
        words.append("controller")
    os.execv(sys.executable, words)  # noqa: S606 - no shell is wanted


def main() -> int:
    """Run the daemon; the exit code."""
    from steward.core.config.reader import load
    from steward.daemon import serve

    config, *more = sys.argv[1:]
    if more:
        from steward.daemon.controller import controller_parts as parts
    else:
        from steward.daemon.workers import parts_of as parts
    try:
        return serve.run(load(config), lambda: load(config), parts)
    except StewardError as error:
        print(f"steward: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
