"""PostgreSQL connections with a time-out on every reply.

The server's own time-outs do not help against a server that hangs. Nor do TCP's, while the
server's kernel still acknowledges packets. :func:`connect_postgresql` is used by
``steward.bank.ledger.engine``.
"""

from typing import Any

import psycopg
from psycopg.abc import RV, PQGen


class PatientConnection(psycopg.Connection[Any]):
    """Connection that closes itself when a reply takes longer than ``reply_timeout_s`` seconds."""

    reply_timeout_s = 25.0

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Wait for a reply as the base class does, but with a time-out.

        Raises:
            psycopg.OperationalError: No reply came in time; the connection is closed.
        """
        try:
            return super().wait(gen, interval, self.reply_timeout_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout as error:
            # The late reply could be taken for the reply to the next query, so close.
            self.pgconn.finish()
            message = f"PostgreSQL did not answer for {self.reply_timeout_s:.0f} s"
            raise psycopg.OperationalError(message) from error


def connect_postgresql(reply_timeout_s: float, **parameters: Any) -> PatientConnection:
    """Open a new connection.

    Args:
        reply_timeout_s: Longest wait for any reply, in seconds.
        parameters: Connection parameters of libpq.

    Raises:
        psycopg.OperationalError: The connection failed.
    """
    connection = PatientConnection.connect("", **parameters)
    connection.reply_timeout_s = reply_timeout_s
    return connection
