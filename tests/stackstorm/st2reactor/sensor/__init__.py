"""Stand-in for StackStorm's package of this name, as far as packs use it."""
