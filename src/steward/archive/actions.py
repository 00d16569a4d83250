"""What the archive can be asked: its actions, for the registry.

Their context is a :class:`steward.archive.library.Library`.
"""

from typing import Final

from steward.archive import exporting, listing, resending, showing, sink_status, upkeep
from steward.archive.answers import (
    DiffAnswer,
    DiffRequest,
    EnvAnswer,
    EnvRequest,
    ListAnswer,
    ListRequest,
    SearchAnswer,
    SearchRequest,
    ShowAnswer,
    ShowRequest,
)
from steward.archive.bulk_answers import (
    ExportAnswer,
    ExportFile,
    ExportRequest,
    ProblemLine,
    Progress,
    PurgeAnswer,
    PurgeRequest,
    ReindexAnswer,
    ReindexRequest,
    SecretLine,
    SecretsAnswer,
    SecretsRequest,
    VerifyAnswer,
    VerifyRequest,
)
from steward.archive.sink_answers import (
    ResendAnswer,
    ResendRequest,
    SinksAnswer,
    SinksRequest,
)
from steward.core.actions import Action

ACTIONS: Final = (
    Action(
        name="archive.list",
        help="List jobs, newest first.",
        request=ListRequest,
        answer=ListAnswer,
        run=listing.list_jobs,
    ),
    Action(
        name="archive.search",
        help="Find scripts by what is in them.",
        request=SearchRequest,
        answer=SearchAnswer,
        run=listing.search,
    ),
    Action(
        name="archive.show",
        help="Show a job and the script it ran.",
        request=ShowRequest,
        answer=ShowAnswer,
        run=showing.show,
    ),
    Action(
        name="archive.env",
        help="Show the environment a job was submitted with.",
        request=EnvRequest,
        answer=EnvAnswer,
        run=showing.env,
    ),
    Action(
        name="archive.diff",
        help="Compare the scripts of two jobs.",
        request=DiffRequest,
        answer=DiffAnswer,
        run=showing.diff,
    ),
    Action(
        name="archive.export",
        help="Give out the scripts of jobs as files.",
        request=ExportRequest,
        answer=ExportAnswer,
        run=exporting.export,
        stream=True,
        items=(ExportFile,),
    ),
    Action(
        name="archive.secrets",
        help="List scripts that look to hold a secret.",
        request=SecretsRequest,
        answer=SecretsAnswer,
        run=exporting.secrets,
        stream=True,
        items=(SecretLine, Progress),
    ),
    Action(
        name="archive.verify",
        help="Recompute every checksum.",
        request=VerifyRequest,
        answer=VerifyAnswer,
        run=upkeep.verify_sinks,
        stream=True,
        items=(ProblemLine, Progress),
        role="operator",
    ),
    Action(
        name="archive.reindex",
        help="Rebuild the catalogue from the files.",
        request=ReindexRequest,
        answer=ReindexAnswer,
        run=upkeep.reindex,
        stream=True,
        items=(Progress,),
        role="administrator",
    ),
    Action(
        name="archive.purge",
        help="Remove scripts for good, everywhere.",
        request=PurgeRequest,
        answer=PurgeAnswer,
        run=upkeep.purge,
        writes=True,
        role="operator",
    ),
    Action(
        name="archive.sinks",
        help="Show how each sink stands.",
        request=SinksRequest,
        answer=SinksAnswer,
        run=sink_status.sinks,
        role="operator",
    ),
    Action(
        name="archive.resend",
        help="Have a sink archive scripts again.",
        request=ResendRequest,
        answer=ResendAnswer,
        run=resending.resend,
        stream=True,
        items=(Progress,),
        writes=True,
        role="operator",
    ),
)
