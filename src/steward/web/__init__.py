"""Web pages and HTTP API of ``steward web``: a process without rights that asks the daemon."""
