"""How facts come in from compute nodes: what their agents send becomes events."""
