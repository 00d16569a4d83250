"""Administration: health checks, backups, status, credentials, plugins, first configuration."""
