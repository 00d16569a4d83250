"""Job accounting: usage, efficiency, job page, sacct, gaps and imports."""
