"""Every operation there is, a module for each kind of thing that it is about."""
