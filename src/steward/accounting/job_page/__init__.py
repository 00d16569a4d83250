"""Job page: what a job was, its usage and efficiency, notes, and why it is pending."""
