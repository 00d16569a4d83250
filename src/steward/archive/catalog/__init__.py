"""Catalog: the search index over scripts, one SQLite file for each month."""
