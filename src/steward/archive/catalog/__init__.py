"""What makes scripts findable by what is in them: an index a month, and the search in it."""
