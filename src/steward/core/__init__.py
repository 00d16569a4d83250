"""What all packages share: events, the journal, consumers, settings, files and processes."""
