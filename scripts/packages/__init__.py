"""Builds Steward's distribution files: wheel, Debian package, RPM, and sources of the plugins."""
