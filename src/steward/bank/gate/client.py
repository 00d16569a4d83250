"""Client of the gate for Steward's own processes: local RPC on a socket in the state directory.

`GateClient` has one method per operation. The gate answers from memory. A call that times out may
have been carried out; every call that changes something may be repeated safely.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, cast

import msgspec

from steward.bank.errors import GateUnavailable
from steward.bank.gate.requests import (
    CONTROL_SOCKET,
    GATE_ERRORS,
    LONGEST_CALL,
    AccountMeans,
    AdmissionVerdict,
    Allowance,
    CompletedPoll,
    DecideRequest,
    GateFact,
    GateStatus,
    GrantRequest,
    HeldTotal,
    HoldQuery,
    HoldReply,
    HoldRequest,
    LeaseRequest,
    MeansRequest,
    PluginReply,
    PluginRequest,
    PriceRequest,
    ReleaseRequest,
    RemoteMeans,
    ReserveRequest,
    SettleRequest,
    ShownJob,
    TimedRequest,
    UnusedReply,
)
from steward.bank.records import BankRules, GateBooks, Hold, JobRequest, Settlement
from steward.core.databases import GATE
from steward.core.rpc import RpcUnavailable, send_request, send_request_async
from steward.slurm.cluster_model import ClusterModel

_MOST_JOBS_IN_CALL: Final = 50
"""Maximum number of jobs in one call: a submit plugin waits for one call at most."""
_HOLDS_PER_CALL: Final = 200
"""Maximum number of holds in one call, for the same reason."""
_COARSEST_TICK_NS: Final = 2_000_000_000
"""Longest tick of a file system's clock, in nanoseconds."""


class GateClient:
    """Connection to the gate: one method for each of its operations.

    All methods raise GateUnavailable if it does not answer, and BankUsage or another of the bank's
    errors if it rejects the call.

    Args:
        state_dir: The directory that holds its socket.
        timeout_s: Time-out of one call, in seconds.
    """

    def __init__(self, state_dir: str, timeout_s: float = 5.0) -> None:
        self._socket_path = os.path.join(state_dir, CONTROL_SOCKET)
        self._wal_path = f"{GATE.locate(state_dir)}-wal"
        self._timeout_s = timeout_s

    def read_change_mark(self) -> tuple[int, ...]:
        """Return numbers that differ after a start of the gate and after each of its writes.

        Two writes within one tick of the file system's clock have the same time: so the numbers
        change once more when the last write is two seconds old.
        """
        mark: list[int] = []
        newest_ns = 0
        for path in (self._socket_path, self._wal_path):
            with contextlib.suppress(OSError):
                info = os.stat(path)
                mark += (info.st_ino, info.st_size, info.st_mtime_ns)
                newest_ns = max(newest_ns, info.st_mtime_ns)
        return (*mark, int(time.time_ns() - newest_ns < _COARSEST_TICK_NS))

    def send_books(self, books: GateBooks) -> int:
        """Send ledger balances; return the ledger position that the gate then knows.

        Also serves as the bank's heartbeat.
        """
        return int(self._call("books", books, int))

    def send_remote_means(self, means: dict[str, RemoteMeans]) -> None:
        """Send limits and balance times that a remote myBRC server reported, by account."""
        self._call("remote_means", means, None)

    def send_rules(self, rules: BankRules) -> None:
        """Send modes and rates."""
        self._call("rules", rules, None)

    def send_model(self, model: ClusterModel) -> None:
        """Send the model of a cluster."""
        self._call("model", model, None)

    def get_status(self) -> GateStatus:
        """Return the gate's status."""
        status: GateStatus = self._call("state", None, GateStatus)
        return status

    def confirm_jobs(self, jobs: Sequence[ShownJob]) -> list[Hold | None]:
        """Report jobs that Slurm shows; return the hold of each, None if no hold covers it."""
        holds: list[Hold | None] = []
        for start in range(0, len(jobs), _MOST_JOBS_IN_CALL):
            batch = list(jobs[start : start + _MOST_JOBS_IN_CALL])
            holds += self._call("confirm", batch, list[Hold | None])
        return holds

    def report_poll(self, cluster: str, began: datetime) -> int:
        """Report a complete poll of the queue; return how many holds were void."""
        return int(self._call("poll", CompletedPoll(cluster=cluster, began=began), int))

    def place_hold(self, request: HoldRequest) -> HoldReply:
        """Place or adjust the hold of a queued job; safe to repeat."""
        reply: HoldReply = self._call("place", request, HoldReply)
        return reply

    def settle(self, settlements: Sequence[Settlement], books: GateBooks | None) -> int:
        """Report charges in the ledger; return the last settlement that was applied.

        Safe to repeat.

        Args:
            settlements: In the order of their seq.
            books: Balances that include these charges.
        """
        last_applied = 0
        for start in range(0, max(1, len(settlements)), _MOST_JOBS_IN_CALL):
            batch = tuple(settlements[start : start + _MOST_JOBS_IN_CALL])
            # With the first call: SU become available again only when their charge is known.
            batch_books = books if not start else None
            last_applied = int(
                self._call("settle", SettleRequest(settlements=batch, books=batch_books), int)
            )
        return last_applied

    def release(self, hold_id: str, why: str, books: GateBooks | None = None) -> int:
        """Release a hold; return its remainder in micro-SU, 0 if it was not open."""
        return int(self._call("release", ReleaseRequest(hold=hold_id, why=why, books=books), int))

    def reserve(self, account: str, amount: int, why: str, allocation: int = 0) -> Hold:
        """Hold SU that are to leave an account; the hold expires unless it is released first."""
        request = ReserveRequest(account=account, amount=amount, why=why, allocation=allocation)
        hold: Hold = self._call("reserve", request, Hold)
        return hold

    def list_held_totals(self) -> list[HeldTotal]:
        """Sum the open holds of each account."""
        totals: list[HeldTotal] = self._call("hold_totals", None, list[HeldTotal])
        return totals

    def list_holds(
        self,
        account: str = "",
        cluster: str = "",
        user: str = "",
        job_id: int = 0,
        after: str = "",
        limit: int = 1000,
        *,
        changed: bool = False,
    ) -> list[Hold]:
        """List open holds after a given one, in the order in which they were placed.

        Args:
            account: "" for any.
            cluster: "" for any.
            user: "" for any.
            job_id: 0 for any.
            after: Id of the hold after which to begin.
            limit: Maximum number of holds.
            changed: Whether to list only holds of jobs with a change that no poll has shown.
        """
        holds: list[Hold] = []
        page: list[Hold] | None = None
        while len(holds) < limit and (page is None or len(page) == _HOLDS_PER_CALL):
            query = HoldQuery(
                account=account,
                cluster=cluster,
                user=user,
                job_id=job_id,
                changed=changed,
                after=holds[-1].id if holds else after,
                limit=min(_HOLDS_PER_CALL, limit - len(holds)),
            )
            page = self._call("holds", query, list[Hold])
            holds += page
        return holds

    def get_means(self, account: str, user: str = "") -> AccountMeans:
        """Return the balance, holds and limits of an account, and of a user in it."""
        means: AccountMeans = self._call(
            "means", MeansRequest(account=account, user=user), AccountMeans
        )
        return means

    def get_verdict(
        self, cluster: str, description: JobRequest, user: str = "", cost: int | None = None
    ) -> AdmissionVerdict:
        """Return the verdict on a job as if it were submitted now; no hold is placed.

        Args:
            cluster: The cluster's name.
            description: The job's request; with a cost, its uid and account are enough.
            user: The user's name; "" to have it looked up.
            cost: The cost, micro-SU; None to have it estimated.
        """
        request = PriceRequest(cluster=cluster, description=description, user=user, cost=cost)
        verdict: AdmissionVerdict = self._call("verdict", request, AdmissionVerdict)
        return verdict

    def list_stranded(self) -> list[Hold]:
        """List holds of waiting jobs that no allocation can pay any more."""
        holds: list[Hold] = self._call("stranded", None, list[Hold])
        return holds

    def list_lingering(self) -> list[Hold]:
        """List holds of arrays with started tasks that are still on an ended allocation."""
        holds: list[Hold] = self._call("lingering", None, list[Hold])
        return holds

    def sum_on_allocation(self, number: int) -> int:
        """Sum the holds of started jobs on an allocation, micro-SU."""
        return int(self._call("on_allocation", number, int))

    def list_facts(self, after: int, limit: int = 500) -> list[GateFact]:
        """List the gate's facts after a seq; the gate deletes those up to it."""
        facts: list[GateFact] = self._call("facts", (after, limit), list[GateFact])
        return facts

    def grant_lease(self, fence: int, valid_s: float, secret: str = "") -> str:
        """Grant or revoke the right to decide; return the gate's key for tokens.

        Args:
            fence: Fencing number of the lease.
            valid_s: Seconds that the lease lasts; 0 revokes it.
            secret: The other gates' key, which this gate adopts; "" for none.
        """
        request = LeaseRequest(fence=fence, valid_s=valid_s, secret=secret)
        return str(self._call("lease", request, str))

    async def decide(
        self,
        requests: Sequence[tuple[PluginRequest, float]],
        deadline: float,
        unused: Sequence[UnusedReply] = (),
    ) -> list[PluginReply | str]:
        """Decide on at most ``MAX_REQUESTS`` requests of submit plugins that ask on other hosts.

        Returns the replies; for a request without one, the reason.

        Args:
            requests: The requests, each with its own deadline.
            deadline: Monotonic time after which the gate decides on none, in seconds.
            unused: Replies to earlier requests whose holds to release.
        """
        timed = tuple(
            TimedRequest(request=msgspec.Raw(msgspec.json.encode(request)), deadline=until)
            for request, until in requests
        )
        body = DecideRequest(requests=timed, deadline=deadline, unused=tuple(unused))
        try:
            return await send_request_async(
                self._socket_path,
                "decide",
                body,
                list[PluginReply | str],
                timeout_s=max(0.0, deadline - time.monotonic()),
                own=GATE_ERRORS,
                max_bytes=LONGEST_CALL,
            )
        except RpcUnavailable as error:
            # The time that remained differs each time; the gate that asks logs the text once.
            is_late = isinstance(error.__cause__, TimeoutError)
            text = "the gate did not answer in time: see its log" if is_late else str(error)
            raise GateUnavailable(text, self._socket_path) from error

    def grant(self, change: PluginRequest, user: str, restarts: int) -> PluginReply:
        """Decide on a change that Steward is about to send for a user, and place its hold.

        Args:
            change: The change, as if the user sent it.
            user: The user's name.
            restarts: Restart count of the run that the change is for.

        Raises:
            NoEstimate: The job cannot be priced.
        """
        request = GrantRequest(ask=change, user=user, restarts=restarts)
        return cast("PluginReply", self._call("grant", request, PluginReply))

    def allow(self, allowance: Allowance) -> None:
        """Let a job pass until a given time, even if its account cannot pay."""
        self._call("allow", allowance, None)

    def _call(self, op: str, body: Any, result_type: Any) -> Any:
        """Send one call; return its decoded result, or raise the error that the gate reports."""
        try:
            return send_request(
                self._socket_path,
                op,
                body,
                result_type,
                timeout_s=self._timeout_s,
                own=GATE_ERRORS,
                max_bytes=LONGEST_CALL,
            )
        except RpcUnavailable as error:
            raise GateUnavailable(str(error), self._socket_path) from error
