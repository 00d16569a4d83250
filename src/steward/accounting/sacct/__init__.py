"""Steward's sacct: select and print accounting lines as Slurm's sacct does."""
