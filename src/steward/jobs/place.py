"""Where jobs.db lies."""


def database_path(state_dir: str) -> str:
    """Where jobs.db lies."""
    return f"{state_dir}/jobs.db"
