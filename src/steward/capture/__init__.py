"""Sources of events: what Slurm and its nodes show becomes events of the journal.

- ``spool`` captures job scripts from a spool that ``slurm_spool`` watches (``spool_entries`` has
  the interface for other schedulers); ``script_lookup`` and ``crash_recovery`` prevent
  duplicates and losses.
- ``queue_polls`` polls squeue; ``observations`` compares the polls.
- ``jobcomp`` follows the lines of native/jobcomp.lua, by means of ``log_follower``.
- ``nodes`` receives the reports of compute nodes; ``sensor`` watches the states of nodes,
  partitions, reservations and daemons.
- ``associations`` polls users and accounts for access checks, and appends no events.
"""
