"""What administrators run: checks, backups, status, credentials, and the first configuration."""
