"""What one path of the API does, and how its parts become an action's request."""

from typing import Any, Final, Literal

import msgspec

from steward.core.actions import Action
from steward.daemon.registry import ACTIONS

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
CURSOR: Final = "cursor"
"""The query's name for where a page begins."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One method of one path.

    Attributes:
        method: Of HTTP.
        path: Below /api/v1; ``{name}`` are its parts.
        action: The action that is asked.
        help: One line for people; the action's own if empty.
        parts: The request's field that a part of the path becomes, where it is called
            otherwise; of a field that holds several, the only one.
        fixed: Fields that the path itself says.
        cursor: The request's field that says where a page begins, and the answer's that says
            where the next one does.
        status: Of a success.
    """

    method: Method
    path: str
    action: str
    help: str = ""
    parts: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    cursor: tuple[str, str] | None = None
    status: int = 200

    @property
    def done_by(self) -> Action:
        """The action itself."""
        return ACTIONS[self.action]

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the path, in order."""
        pieces = self.path.split("/")
        return tuple(piece[1:-1] for piece in pieces if piece.startswith("{"))

    @property
    def fields(self) -> tuple[msgspec.structs.FieldInfo, ...]:
        """The request's fields that neither the path nor we fill."""
        taken = {self.parts.get(name, name) for name in self.names} | set(self.fixed)
        every = msgspec.structs.fields(self.done_by.request)
        return tuple(field for field in every if field.name not in taken)

    @property
    def id(self) -> str:
        """A name for it, which no other has."""
        words = [part.strip("{}") for part in self.path.split("/") if part]
        return "_".join((self.method.lower(), *words)).replace(".", "_").replace("-", "_")

    def request(self, parts: dict[str, str], given: dict[str, Any]) -> Any:
        """The action's request.

        Args:
            parts: Of the path.
            given: The other fields, as they were asked for.

        Raises:
            msgspec.ValidationError: A part is not of its field's kind.
        """
        kinds = {field.name: field.type for field in msgspec.structs.fields(self.done_by.request)}
        filled = {}
        for name in self.names:
            field = self.parts.get(name, name)
            filled[field] = _part(parts[name], kinds[field])
        return self.done_by.request(**given, **filled, **self.fixed)


def _part(text: str, kind: Any) -> Any:
    is_many = getattr(kind, "__origin__", None) is tuple
    return msgspec.convert((text,) if is_many else text, kind, strict=False)


def _get(path: str, action: str, help_: str = "", **more: Any) -> Endpoint:
    return Endpoint(method="GET", path=path, action=action, help=help_, **more)


def _post(path: str, action: str, help_: str = "", **more: Any) -> Endpoint:
    return Endpoint(method="POST", path=path, action=action, help=help_, **more)


_JOBS: Final = (
    _get("/jobs", "accounting.jobs", "List jobs.", cursor=("page", "next")),
    _get("/scripts", "archive.search", "Search in scripts.", cursor=("page", "next")),
    _get("/job-states", "accounting.job_states", "Count jobs by state."),
    _get("/jobs/{job}", "accounting.job", "Show what a job was and what it used."),
    _get("/jobs/{job}/script", "archive.show", "Show a job's script."),
    _get("/jobs/{job}/environment", "archive.env"),
    _get(
        "/jobs/{left}/diff/{right}", "archive.diff", "Show what differs between two jobs' scripts."
    ),
    _get("/jobs/{job}/cost", "bank.explain", "Explain what a job cost."),
    _get("/jobs/{job}/events", "history.job_events"),
)

_BANK: Final = (
    _get("/accounts", "bank.account_show"),
    _post("/accounts", "bank.account_create"),
    _get("/accounts/{account}", "bank.account_show", parts={"account": "names"}),
    Endpoint(
        method="PATCH",
        path="/accounts/{account}",
        action="bank.account_change",
        parts={"account": "name"},
    ),
    _get("/accounts/{account}/balance", "bank.balance", parts={"account": "accounts"}),
    _get("/accounts/{account}/statement", "bank.statement"),
    _get("/accounts/{account}/course", "bank.course"),
    _get("/accounts/{account}/holds", "bank.holds"),
    _get("/accounts/{account}/users", "bank.user_show", parts={"account": "accounts"}),
    Endpoint(
        method="PUT",
        path="/accounts/{account}/users/{user}",
        action="bank.user_change",
        help="Set what a user may spend of an account.",
    ),
    _get("/accounts/{account}/allocations", "bank.allocation_show", parts={"account": "names"}),
    _post("/accounts/{account}/allocations", "bank.allocation_create"),
    Endpoint(
        method="PATCH",
        path="/allocations/{allocation}",
        action="bank.allocation_change",
        parts={"allocation": "number"},
    ),
    _post("/accounts/{account}/deposits", "bank.deposit"),
    _post("/accounts/{account}/withdrawals", "bank.withdraw"),
    _post("/accounts/{account}/adjustments", "bank.adjust"),
    _post("/refunds", "bank.refund"),
    _post("/allowances", "bank.allow"),
    _post("/transfers", "bank.transfer"),
    _get("/balances", "bank.balance", "Show what is left in all accounts."),
    _get("/holds", "bank.holds", "List what is held for jobs."),
    _get("/usage", "bank.usage", "Show who spent what."),
    _get(
        "/users/{user}/accounts",
        "bank.user_show",
        "List a user's accounts.",
        parts={"user": "users"},
    ),
    _get("/rates", "bank.rate_show"),
    _post("/rates", "bank.rate_create"),
    _post("/quotes", "bank.quote", "Say what a job would cost."),
)

_CLUSTER: Final = (
    _get("/nodes", "history.nodes", "List nodes, as they are or were."),
    _get(
        "/nodes/{node}",
        "history.nodes",
        "Show a node, or those of a list.",
        parts={"node": "nodes"},
    ),
    _get("/nodes/{node}/history", "history.node"),
    _get("/partitions", "history.partitions"),
    _get("/reservations", "history.reservations"),
    _get("/nodes/{node}/jobs", "history.node_jobs", "List what ran on a node."),
    _get("/events", "history.events", "Show what happened.", cursor=("before", "older")),
    _get("/actions", "automation.list", "List what can be done to a cluster."),
    _get("/actions/{action}", "automation.help", "Show what an action takes."),
    _post("/actions/{action}", "automation.run", "Have an action done."),
    _get("/audit", "automation.audit"),
    _get("/rules", "rules.list"),
    _get("/rules/executions", "rules.history", "Show what rules did."),
    _post("/rules/{rule}/enable", "rules.enable"),
    _post("/rules/{rule}/disable", "rules.disable"),
)

_REPORTS: Final = tuple(
    _get(f"/reports/{action.partition('.')[2]}", action)
    for action in ACTIONS
    if action.startswith("reports.")
)

_STEWARD: Final = (
    _get("/me", "credentials.me"),
    _get("/tokens", "credentials.token_list"),
    _post("/tokens", "credentials.token_create", status=201),
    Endpoint(
        method="DELETE",
        path="/tokens/{token}",
        action="credentials.token_revoke",
        help="Take a token back.",
        parts={"token": "numbers"},
    ),
    _get("/status", "status.show"),
    _get("/doctor", "doctor.run"),
    _get("/gaps", "accounting.gaps"),
)

_NOT_ASKED: Final = frozenset(
    f"credentials.{verb}" for verb in ("open", "vouch", "peek", "close", "settings")
)
"""What only the pages' own process may ask."""

ASK: Final = "/ask/"
ENDPOINTS: Final[tuple[Endpoint, ...]] = (*_JOBS, *_BANK, *_CLUSTER, *_REPORTS, *_STEWARD)
"""All that is not below /ask/ …"""

ASKS: Final = tuple(
    _post(f"{ASK}{name}", name) for name in sorted(ACTIONS) if name not in _NOT_ASKED
)
"""… and every action by its name."""
