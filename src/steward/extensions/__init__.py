"""Optional extensions, each loaded by its entry point.

``controllers`` forwards events between hosts, ``jobacct_plugins`` runs accounting plugins and the
job log, ``kafka`` is an archive sink and a source of scripts, ``search_servers`` are archive sinks
with search, ``mybrc`` is an API of the bank, ``torque`` captures another scheduler's jobs.
"""
