"""Draft trees: static and dynamic ones, the search for the best, files and drawings."""

from medusa_cli.tree.tree import Draft, DynamicTree, Tree, TreeBuilder

__all__ = ["Draft", "DynamicTree", "Tree", "TreeBuilder"]
