"""Trees of guesses: their shape, the search for the best one, files and pictures."""

from medusa_cli.tree.tree import Tree

__all__ = ["Tree"]
