"""The daemon: workers that connect sources, journal and consumers, and their supervisor."""
