"""What tests build a Steward from: one Site, and by subject the events and answers around it."""
