"""Facts that a program on this host writes into a file, a line each."""
