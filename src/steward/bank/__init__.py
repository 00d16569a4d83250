"""Bank: charge jobs in service units (SU), reserve SU at submission, and keep the ledger.

- ``ledger`` stores accounts, allocations, transfers and charges; ``records`` has the shared types.
- ``gate`` answers slurmctld's submit plugin: it admits or rejects jobs and places SU holds, at the
  price that ``estimate`` and ``prices`` compute.
- ``consumer`` runs in ``steward serve``: it charges finished runs (``billing``), settles holds,
  keeps the gate up to date (``gate_sync``), finds unpaid jobs (``enforcement``), compares charges
  with Slurm's records (``reconciliation``) and does the work of ``schedule``, such as ``notices``.
- ``actions`` answers the requests of people and programs, with a ``context``.
"""
