"""Model of the reference myBRC server's usage arithmetic, as its public API shows it.

POST stores a job, and adds its amount to the account's usage only if the job has submit and
start times. PUT stores a job, new or not, and adds the difference to the stored amount only
with submit, start and end times. Usage never falls below zero. A job can be submitted if its
cost, added to the usage, exceeds neither the account's allocation nor the user's.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from servers.http_server import Quiet, answering


class ReferenceBank:
    """Jobs, and the usage of one account."""

    def __init__(self) -> None:
        self.usage = Decimal(0)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.allocation: Decimal | None = Decimal(1000)
        """Allocation of the account; None for no limit."""
        self.users: dict[str, tuple[Decimal, Decimal]] = {}
        """Usage and limit of some users, by uid."""
        self.strangers: set[str] = set()
        """Uids of users who are not members."""
        self.words: Any = None
        """Message to send in place of the server's own."""
        self.questions: list[str] = []
        """Accounts of the questions."""
        self.asked: Callable[[], None] = lambda: None
        """Function that is called before a question is answered."""

    def create(self, body: dict[str, Any]) -> int:
        """Serve POST jobs/."""
        if body["jobslurmid"] in self.jobs:
            return 400
        self.jobs[body["jobslurmid"]] = body
        if {"submitdate", "startdate"} <= body.keys():
            self._add(Decimal(body["amount"]))
        return 201

    def update(self, job_id: str, body: dict[str, Any]) -> int:
        """Serve PUT jobs/ID/."""
        before = self.jobs.get(job_id, {"amount": "0.00"})
        self.jobs[job_id] = body
        if {"submitdate", "startdate", "enddate"} <= body.keys():
            self._add(Decimal(body["amount"]) - Decimal(before["amount"]))
        return 200

    def afford(self, cost: Decimal, uid: str) -> tuple[int, dict[str, Any]]:
        """Serve GET can_submit_job/COST/UID/ACCOUNT/."""
        self.asked()
        if cost > Decimal("999999999.99"):
            return 400, {"success": False, "message": "job_cost has too many digits."}
        if uid in self.strangers:
            return 200, {"success": False, "message": f"User {uid} is not a member of account."}
        sums = [("account", self.usage, self.allocation)]
        if uid in self.users:
            sums.append(("user", *self.users[uid]))
        for what, used, most in sums:
            if most is not None and used + cost > most:
                words = (
                    f"Adding job_cost {cost} to {what} balance {used} would exceed "
                    f"{what} allocation {most}."
                )
                return 200, {
                    "success": False,
                    "message": words if self.words is None else self.words,
                }
        return 200, {"success": True, "message": f"A job with job_cost {cost} can be submitted."}

    def serving(self) -> AbstractContextManager[ThreadingHTTPServer]:
        """Serve these requests under ``/api``."""
        bank = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Store a new job."""
                self._answer("POST")

            def do_PUT(self) -> None:
                """Store a job, new or not."""
                self._answer("PUT")

            def do_GET(self) -> None:
                """Answer whether a job can be submitted."""
                *start, cost, uid, account, _ = self.path.split("/")
                bank.questions.append(account)
                if start != ["", "api", "can_submit_job"] or account != "physics":
                    code, said = 400, {"success": False, "message": "No account exists."}
                else:
                    code, said = bank.afford(Decimal(cost), uid)
                self.send_response(code)
                answer = json.dumps(said).encode()
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _answer(self, method: str) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                bank.requests.append((method, body))
                if not self.path.startswith("/api/jobs/"):
                    code = 404
                elif method == "POST":
                    code = bank.create(body)
                else:
                    code = bank.update(self.path.split("/")[-2], body)
                self.send_response(code)
                answer = json.dumps(body).encode()
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        return answering(Handler)

    def _add(self, amount: Decimal) -> None:
        self.usage = max(Decimal(0), self.usage + amount)
