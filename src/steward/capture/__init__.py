"""How facts come in."""
