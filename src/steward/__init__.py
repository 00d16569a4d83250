"""Steward keeps the books of a Slurm cluster."""

__version__ = "0.9.0"
