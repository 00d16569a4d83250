"""Health checks of the installation: ``steward doctor``."""
