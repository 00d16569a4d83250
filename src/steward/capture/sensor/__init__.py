"""Sensor: detects state changes of nodes, partitions, reservations and Slurm's daemons.

``sensor`` polls, ``changes`` compares, ``store`` keeps the reported states and unsent events,
``triggers`` wakes the sensor early, through ``trigger_helper``, which slurmctld starts.
"""
