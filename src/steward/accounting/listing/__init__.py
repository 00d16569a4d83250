"""Lists of jobs to look through: with what each was given and used, an array as one row."""
