"""Source for compute nodes: receives what their agents send and turns it into events."""
