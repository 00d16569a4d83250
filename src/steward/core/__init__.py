"""Shared mechanisms of all packages: events, journal, consumers, settings, access, files."""
