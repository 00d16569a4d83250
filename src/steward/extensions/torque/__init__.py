"""pbs_server's spool: how it is watched, what lies in it, and what its job files tell."""
