"""Draft trees: static and dynamic trees, the search for the best static tree, tree files and drawings."""

from medusa_cli.tree.dynamic import DynamicTree, Prices, TreeBuilder
from medusa_cli.tree.tree import Draft, Growth, Tree

__all__ = ["Draft", "DynamicTree", "Growth", "Prices", "Tree", "TreeBuilder"]
