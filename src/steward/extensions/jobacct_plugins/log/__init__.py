"""Job log, the plugin jobacct/log: one file of records a day, its writer, packer and reader.

``records`` defines the records, ``files`` the files of a day. ``consumer`` writes them, with its
database ``state``, and runs ``parquet`` and ``purges`` as processes. ``reader`` reads a log,
``actions`` dump and purge it.
"""
