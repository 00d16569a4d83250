"""The configuration file: reads it, and says in one line what is wrong with it and where."""
