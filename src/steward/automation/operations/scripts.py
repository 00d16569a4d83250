"""slurm.script.get: the script that a job ran, from the archive."""

from typing import Annotated, Any, Final

import msgspec

from steward.automation.operation import Doing, Operation, Parameters


class ScriptGet(Parameters, frozen=True, kw_only=True):
    """slurm.script.get."""

    jobid: Annotated[str, msgspec.Meta(description="The job: 123, 123_7, 123+1.")]


def get(doing: Doing, asked: ScriptGet) -> dict[str, Any]:
    """A job's script, as far as the asker may read it; bytes that are no text as base64."""
    answer = doing.ask("archive.show", {"job": asked.jobid, "cluster": doing.cluster})
    shown: dict[str, Any] = msgspec.to_builtins(answer)
    content = shown["content"] or {}
    return {
        "jobid": asked.jobid,
        "cluster": shown["job"]["cluster"],
        "script": content.get("text"),
        "encoding": content.get("encoding"),
        "script_of": shown["script_of"],
        "sha256": (shown["script"] or {}).get("sha256"),
    }


OPERATIONS: Final = (
    Operation(
        ref="slurm.script.get",
        help="Show the script that a job ran, from the archive.",
        gives="The script; base64 where it is no text, see encoding.",
        parameters=ScriptGet,
        run=get,
        on_cluster=False,
    ),
)
