"""Program that runs an action of a pack in a separate process, as StackStorm's python runner does.

Parameters come as one line of JSON on the standard input, ``{"parameters": {…}}``; the result of
``run`` goes to the standard output as JSON between two marks.
"""

import argparse
import importlib.util
import inspect
import json
import sys

from st2common.runners.base_action import Action

MARK = "%%%%%~=~=~=************=~=~=~%%%%"


class ActionService:
    """The part of StackStorm's action service that actions call."""

    def __init__(self, user: str) -> None:
        self._user = user

    def get_user_info(self) -> dict[str, str]:
        """Return the user who runs the action, in the API's form."""
        if not self._user:
            raise ConnectionError("StackStorm's API is away")
        return {"username": self._user}


def main() -> None:
    """Run one action."""
    options = argparse.ArgumentParser()
    options.add_argument("--pack", required=True)
    options.add_argument("--file-path", required=True)
    options.add_argument("--config", default="{}")
    options.add_argument("--stdin-parameters", action="store_true", required=True)
    options.add_argument("--user", default="")
    given = options.parse_args()
    parameters = json.loads(sys.stdin.readline())["parameters"]
    spec = importlib.util.spec_from_file_location("action", given.file_path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (kind,) = (
        one
        for _, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, Action) and one is not Action
    )
    service = ActionService(given.user)
    output = kind(json.loads(given.config), service).run(**parameters)
    status, result = output if isinstance(output, tuple) and len(output) == 2 else (None, output)
    assert status in (None, True, False), status
    sys.stdout.write(f"{MARK}{json.dumps({'result': result, 'status': status})}\n{MARK}")


if __name__ == "__main__":
    main()
