"""Status of Steward itself, for people (``steward status``) and for Prometheus."""
