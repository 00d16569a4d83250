"""Live telemetry: samples of running jobs, from the batches of node agents to curves.

``batch`` declares the series and decodes batches, ``chunks`` encodes columns of samples, ``store``
writes telemetry.db, and ``curves`` reads it. ``placements`` knows which jobs Slurm placed on which
node. Samples never enter the journal.
"""
