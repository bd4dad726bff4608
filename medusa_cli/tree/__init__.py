"""Draft trees: what they are, the best static tree, files and drawings."""

from medusa_cli.tree.tree import Draft, DynamicTree, Tree, TreeBuilder

__all__ = ["Draft", "DynamicTree", "Tree", "TreeBuilder"]
