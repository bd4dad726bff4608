"""Drafters in the layouts of other programs, out and in."""
