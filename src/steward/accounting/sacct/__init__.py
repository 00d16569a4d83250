"""``steward sacct``: lines of accounting, chosen and printed as Slurm's sacct does."""
