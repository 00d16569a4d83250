"""The page of a job for a person: what it used, how well, and what is to be remarked on."""
