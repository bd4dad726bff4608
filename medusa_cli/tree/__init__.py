"""Trees of guesses: what they are, the best static one, dynamic ones, files and drawings."""

from medusa_cli.tree.dynamic import DynamicTree, TreeBuilder
from medusa_cli.tree.tree import Tree

__all__ = ["TreeBuilder", "DynamicTree", "Tree"]
