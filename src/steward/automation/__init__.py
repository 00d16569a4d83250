"""Automation: operations that change a cluster, and rules that run them when events arrive."""
