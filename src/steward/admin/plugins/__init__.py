"""Plugins that Slurm loads, in C and Lua: build, install and check them."""
