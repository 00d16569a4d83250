"""``steward doctor``: whether all is as it must be for Steward to keep a cluster's books."""
