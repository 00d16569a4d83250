"""Who somebody is, on whichever host of a cluster, as MUNGE tells it."""
