"""Test helpers: Site, and by subject the events, jobs and replies that tests give it."""
