"""What a cluster was used for, by whom, how long jobs waited and what was wasted."""
