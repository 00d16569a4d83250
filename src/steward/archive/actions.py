"""Archive actions ``archive.*``: list, search, show, export, verify, purge and resend scripts.

``ACTIONS`` declares the actions for the registry; their handlers are in ``lookup``, ``export`` and
``maintenance`` and get a :class:`steward.archive.context.ArchiveContext` as context.
"""

from typing import Final

from steward.archive import export, lookup, maintenance
from steward.archive.lookup import list_jobs
from steward.archive.maintenance import verify_sinks
from steward.archive.requests import (
    DiffReply,
    DiffRequest,
    EnvironmentReply,
    EnvironmentRequest,
    ExportFile,
    ExportReply,
    ExportRequest,
    JobListReply,
    JobListRequest,
    ProblemLine,
    Progress,
    PurgeReply,
    PurgeRequest,
    ReindexReply,
    ReindexRequest,
    ResendReply,
    ResendRequest,
    SearchReply,
    SearchRequest,
    SecretLine,
    SecretsReply,
    SecretsRequest,
    ShowReply,
    ShowRequest,
    SinksReply,
    SinksRequest,
    VerifyReply,
    VerifyRequest,
)
from steward.core.actions import Action

ACTIONS: Final = (
    Action(
        name="archive.list",
        help="List jobs, newest first.",
        request=JobListRequest,
        answer=JobListReply,
        run=list_jobs,
    ),
    Action(
        name="archive.search",
        help="Find scripts by what is in them.",
        request=SearchRequest,
        answer=SearchReply,
        run=lookup.search_scripts,
    ),
    Action(
        name="archive.show",
        help="Show a job and the script it ran.",
        request=ShowRequest,
        answer=ShowReply,
        run=lookup.show_job,
    ),
    Action(
        name="archive.env",
        help="Show the environment a job was submitted with.",
        request=EnvironmentRequest,
        answer=EnvironmentReply,
        run=lookup.show_environment,
    ),
    Action(
        name="archive.diff",
        help="Compare the scripts of two jobs.",
        request=DiffRequest,
        answer=DiffReply,
        run=lookup.compare_scripts,
    ),
    Action(
        name="archive.export",
        help="Give out the scripts of jobs as files.",
        request=ExportRequest,
        answer=ExportReply,
        run=export.export_scripts,
        stream=True,
        items=(ExportFile,),
    ),
    Action(
        name="archive.secrets",
        help="List scripts that look to hold a secret.",
        request=SecretsRequest,
        answer=SecretsReply,
        run=export.find_script_secrets,
        stream=True,
        items=(SecretLine, Progress),
    ),
    Action(
        name="archive.verify",
        help="Recompute every checksum.",
        request=VerifyRequest,
        answer=VerifyReply,
        run=verify_sinks,
        stream=True,
        items=(ProblemLine, Progress),
        role="operator",
    ),
    Action(
        name="archive.reindex",
        help="Rebuild the catalogue from the files.",
        request=ReindexRequest,
        answer=ReindexReply,
        run=maintenance.rebuild_catalog,
        stream=True,
        items=(Progress,),
        role="administrator",
    ),
    Action(
        name="archive.purge",
        help="Remove scripts for good, everywhere.",
        request=PurgeRequest,
        answer=PurgeReply,
        run=maintenance.purge_scripts,
        writes=True,
        role="operator",
    ),
    Action(
        name="archive.sinks",
        help="Show how each sink stands.",
        request=SinksRequest,
        answer=SinksReply,
        run=maintenance.show_sinks,
        role="operator",
    ),
    Action(
        name="archive.resend",
        help="Have a sink archive scripts again.",
        request=ResendRequest,
        answer=ResendReply,
        run=maintenance.resend_scripts,
        stream=True,
        items=(Progress,),
        writes=True,
        role="operator",
    ),
)
