"""The pages and the API: a process of its own that has no rights and asks the daemon."""
