"""``steward init``: a first configuration, and what Slurm is to be told."""
