"""PostgreSQL connections with a time-out on every reply.

The server's own time-outs do not help against a server that hangs. Nor do TCP's, while the
server's kernel still acknowledges packets. :func:`connect_postgresql` is used by
``steward.bank.ledger.engine``.
"""

from typing import Any

import psycopg
from psycopg.abc import RV, PQGen


class PatientConnection(psycopg.Connection[Any]):
    """Connection that closes itself when a reply takes longer than ``patience_s`` seconds."""

    patience_s = 25.0

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Wait for a reply as the base class does, but with a time-out.

        Raises:
            psycopg.OperationalError: No reply came in time; the connection is closed.
        """
        try:
            return super().wait(gen, interval, self.patience_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout as error:
            # The late reply could be taken for the reply to the next query, so close.
            self.pgconn.finish()
            said = f"PostgreSQL did not answer for {self.patience_s:.0f} s"
            raise psycopg.OperationalError(said) from error


def connect_postgresql(patience_s: float, **words: Any) -> PatientConnection:
    """Open a new connection.

    Args:
        patience_s: Longest wait for any reply, in seconds.
        words: Connection parameters of libpq.

    Raises:
        psycopg.OperationalError: The connection failed.
    """
    connection = PatientConnection.connect("", **words)
    connection.patience_s = patience_s
    return connection
