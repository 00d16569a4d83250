"""Builds, installs and checks what Slurm loads: plugins in C and Lua."""
