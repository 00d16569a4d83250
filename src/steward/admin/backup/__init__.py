"""Backup and restore of Steward's state, made while the daemon runs."""
