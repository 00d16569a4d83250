"""The plugin jobacct/log: the job log, its days, and what reads them."""
