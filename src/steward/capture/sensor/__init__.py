"""How nodes, partitions, reservations and daemons are watched, and their changes told."""
