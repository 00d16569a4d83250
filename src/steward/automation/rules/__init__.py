"""Automation rules: parsed files, matching of events, executions and their history."""
