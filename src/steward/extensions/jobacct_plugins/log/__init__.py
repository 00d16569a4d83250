"""Job log, the plugin jobacct/log: one file of records a day, its writer, packer and reader."""
