"""Archive actions ``archive.*``: list, search, show, export, verify, purge and resend scripts.

``ACTIONS`` declares the actions for the registry; their handlers are in ``lookup``, ``export`` and
``maintenance`` and get a :class:`steward.archive.context.Library` as context.
"""

from typing import Final

from steward.archive import export, lookup, maintenance
from steward.archive.lookup import list_jobs
from steward.archive.maintenance import verify_sinks
from steward.archive.requests import (
    DiffAnswer,
    DiffRequest,
    EnvAnswer,
    EnvRequest,
    ExportAnswer,
    ExportFile,
    ExportRequest,
    ListAnswer,
    ListRequest,
    ProblemLine,
    Progress,
    PurgeAnswer,
    PurgeRequest,
    ReindexAnswer,
    ReindexRequest,
    ResendAnswer,
    ResendRequest,
    SearchAnswer,
    SearchRequest,
    SecretLine,
    SecretsAnswer,
    SecretsRequest,
    ShowAnswer,
    ShowRequest,
    SinksAnswer,
    SinksRequest,
    VerifyAnswer,
    VerifyRequest,
)
from steward.core.actions import Action

ACTIONS: Final = (
    Action(
        name="archive.list",
        help="List jobs, newest first.",
        request=ListRequest,
        answer=ListAnswer,
        run=list_jobs,
    ),
    Action(
        name="archive.search",
        help="Find scripts by what is in them.",
        request=SearchRequest,
        answer=SearchAnswer,
        run=lookup.search,
    ),
    Action(
        name="archive.show",
        help="Show a job and the script it ran.",
        request=ShowRequest,
        answer=ShowAnswer,
        run=lookup.show,
    ),
    Action(
        name="archive.env",
        help="Show the environment a job was submitted with.",
        request=EnvRequest,
        answer=EnvAnswer,
        run=lookup.env,
    ),
    Action(
        name="archive.diff",
        help="Compare the scripts of two jobs.",
        request=DiffRequest,
        answer=DiffAnswer,
        run=lookup.diff,
    ),
    Action(
        name="archive.export",
        help="Give out the scripts of jobs as files.",
        request=ExportRequest,
        answer=ExportAnswer,
        run=export.export,
        stream=True,
        items=(ExportFile,),
    ),
    Action(
        name="archive.secrets",
        help="List scripts that look to hold a secret.",
        request=SecretsRequest,
        answer=SecretsAnswer,
        run=export.secrets,
        stream=True,
        items=(SecretLine, Progress),
    ),
    Action(
        name="archive.verify",
        help="Recompute every checksum.",
        request=VerifyRequest,
        answer=VerifyAnswer,
        run=verify_sinks,
        stream=True,
        items=(ProblemLine, Progress),
        role="operator",
    ),
    Action(
        name="archive.reindex",
        help="Rebuild the catalogue from the files.",
        request=ReindexRequest,
        answer=ReindexAnswer,
        run=maintenance.reindex,
        stream=True,
        items=(Progress,),
        role="administrator",
    ),
    Action(
        name="archive.purge",
        help="Remove scripts for good, everywhere.",
        request=PurgeRequest,
        answer=PurgeAnswer,
        run=maintenance.purge,
        writes=True,
        role="operator",
    ),
    Action(
        name="archive.sinks",
        help="Show how each sink stands.",
        request=SinksRequest,
        answer=SinksAnswer,
        run=maintenance.sinks,
        role="operator",
    ),
    Action(
        name="archive.resend",
        help="Have a sink archive scripts again.",
        request=ResendRequest,
        answer=ResendAnswer,
        run=maintenance.resend,
        stream=True,
        items=(Progress,),
        writes=True,
        role="operator",
    ),
)
