"""Checks, text and files: used everywhere, knows nothing of the rest."""
