"""Sources of events: spool, queue polls, jobcomp lines, compute nodes, sensor, crash recovery."""
