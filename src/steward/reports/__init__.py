"""Usage reports: utilization of clusters, usage by account and user, wait times and waste."""
