"""What became of nodes, partitions, reservations, daemons and rules, kept for years."""
