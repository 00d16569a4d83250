"""Archive of job scripts and environments: sinks, catalog, search, export and retention."""
