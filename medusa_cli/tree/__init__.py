"""Draft trees: static and dynamic trees, the search for the best one, files and drawings."""

from medusa_cli.tree.tree import Draft, DynamicTree, Growth, Prices, Tree, TreeBuilder

__all__ = ["Draft", "DynamicTree", "Growth", "Prices", "Tree", "TreeBuilder"]
