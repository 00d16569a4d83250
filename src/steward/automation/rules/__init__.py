"""Rules: what is done about events, and what was done."""
