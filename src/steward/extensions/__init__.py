"""Parts that a site may do without; each is loaded by its entry point."""
