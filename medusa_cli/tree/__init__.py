"""Draft trees: what they are, the best static tree, dynamic trees, and drawings."""

from medusa_cli.tree.dynamic import DynamicTree, TreeBuilder
from medusa_cli.tree.tree import Tree

__all__ = ["DynamicTree", "Tree", "TreeBuilder"]
