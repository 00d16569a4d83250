"""Steward's sacct: select and print accounting lines as Slurm's sacct does.

``options`` parses the command line into a request (``requests``), ``selection`` turns the request
into a filter of lines, which ``steward.jobs.line_sources`` reads; ``output`` selects the runs to
show and streams them, formatted by ``fields`` and ``values``.
"""
