"""slurmctld's spool: how it is watched, and what lies in it."""
