"""What other hosts forward: ``steward controller`` sends, ``steward serve`` receives."""
