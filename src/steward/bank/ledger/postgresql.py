"""A connection to PostgreSQL that waits for no answer for ever.

The server's own time-outs do not help against a server that stands still, and
TCP's neither while its kernel goes on to acknowledge.
"""

from typing import Any

import psycopg
from psycopg.abc import RV, PQGen


class PatientConnection(psycopg.Connection[Any]):
    """A connection that is given up when an answer takes longer than ``patience_s`` seconds."""

    patience_s = 25.0

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Wait for an answer, as the class it is made of; but not for ever.

        Raises:
            psycopg.OperationalError: There was none in time; the connection is closed.
        """
        try:
            return super().wait(gen, interval, self.patience_s if timeout is None else timeout)
        except psycopg.errors._WaitTimeout as error:
            # Its answer may still come, to whatever is asked next.
            self.pgconn.finish()
            said = f"PostgreSQL did not answer for {self.patience_s:.0f} s"
            raise psycopg.OperationalError(said) from error


def connect(patience_s: float, **words: Any) -> PatientConnection:
    """A new connection.

    Args:
        patience_s: How long to wait for any answer, in seconds.
        words: As libpq takes them.

    Raises:
        psycopg.OperationalError: There is none to be had.
    """
    connection = PatientConnection.connect("", **words)
    connection.patience_s = patience_s
    return connection
