"""What Slurm itself loads, in C and in Lua, and how it is built, installed and checked."""
