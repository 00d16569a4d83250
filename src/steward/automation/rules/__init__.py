"""Automation rules: parsed files, matching of events, executions and their history.

``rulebook`` loads the rule files (``parser``, ``model``). ``consumer`` reads journal events:
``triggers`` makes an event a payload; ``decisions`` compares it with each rule (``criteria``),
renders the parameters (``templates``) and stores an execution (``store``); ``execution`` runs that
as an operation, within ``limits``. ``actions`` and ``requests`` serve command line and API.
"""
