"""Automation: operations that change a cluster, and rules that run them when events arrive.

``operation`` says how an operation is declared, ``operations`` holds them all, ``runner`` runs and
audits them, ``actions`` offers them to command line, API and socket. ``job_holds`` and
``node_reasons`` protect what other people have set. ``rules`` reacts to events.
"""
