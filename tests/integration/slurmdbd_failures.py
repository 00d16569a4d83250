"""Failures of slurmdbd's database."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from steward.sandbox import Sandbox
from steward.sandbox.configuration import find_mariadb_program, get_mariadb_socket


@contextmanager
def failing_queries(cluster: Sandbox) -> Iterator[None]:
    """Let slurmdbd's queries of its job table fail, as on a deadlock: sacct exits with 0."""

    def query(statement: str) -> str:
        client = find_mariadb_program("mariadb")
        words = [client, f"--socket={get_mariadb_socket(cluster.directory)}", "-N", "-e", statement]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout

    (table,) = query(
        "SELECT concat(table_schema, '.', table_name) FROM information_schema.tables "
        "WHERE table_name LIKE '%\\_job\\_table'"
    ).split()
    query(f"RENAME TABLE {table} TO {table}_away")
    try:
        yield
    finally:
        query(f"RENAME TABLE {table}_away TO {table}")
