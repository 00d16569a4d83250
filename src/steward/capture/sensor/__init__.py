"""Sensor: detects state changes of nodes, partitions, reservations and Slurm's daemons."""
