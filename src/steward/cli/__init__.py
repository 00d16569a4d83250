"""Command line of Steward: one thin module for each command group; ``app.py`` lists them."""
