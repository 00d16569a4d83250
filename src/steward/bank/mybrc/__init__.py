"""The myBRC REST API, served and spoken."""
