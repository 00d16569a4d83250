"""Node history: states of nodes, partitions, reservations, daemons and rules, kept for years."""
