"""Stands for the package of this name that StackStorm has, as far as packs see it."""
