"""Wires sources to the journal and the journal to consumers; supervises the processes."""
