"""Job accounting: what each job used, kept, shown, and handed to plugins."""
