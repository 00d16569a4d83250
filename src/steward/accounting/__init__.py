"""Job accounting: usage, efficiency, job page, sacct, gaps and imports.

- ``actions`` lists the actions; ``context`` is what they work with: jobs.db, permissions, settings.
- ``sacct`` prints accounting lines as Slurm's sacct does; ``job_list`` lists and counts jobs.
- ``job_page`` shows one job: usage, efficiency, notes, and why it is pending.
- ``gaps`` finds missing data; ``imports`` reads slurmdbd, files of sacct and other job logs.
- ``job_log`` is the interface of the extension that writes and reads the job log.

:mod:`steward.jobs` makes the accounting lines that all of these read.
"""
