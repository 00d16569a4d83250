"""Backups of all that Steward knows, made while it runs, and how they are put back."""
