"""Makes what Steward is installed from: wheel, Debian package, RPM, and sources of the plugins."""
