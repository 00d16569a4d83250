"""Service units: what jobs may cost, what they did cost, and the ledger that proves it."""
