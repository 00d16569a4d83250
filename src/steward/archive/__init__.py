"""Every job's script and environment, kept and found again."""
