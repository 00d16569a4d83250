"""Native plugins that Slurm loads, in C and Lua."""
