"""How Steward itself stands, for people and for monitoring."""
