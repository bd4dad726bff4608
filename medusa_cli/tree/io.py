"""Tree files, which hold a tree or a list of rank paths, and the provenance of the tree search."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.files.io import convert, read_json, write_json
from medusa_cli.tree.tree import Tree

# A step verifies all N nodes at once, with an N x N mask. No machine benefits from more nodes than this.
MAX_NODES = 1024
REMEDY = "make one with `medusa tree`, or give a list of rank paths"


def save_tree(path: Path, tree: Tree, provenance: dict[str, Any]) -> None:
    """Writes a tree and its provenance atomically."""
    write_json(path, {**tree.to_json(), "choices": tree.choices, "provenance": provenance})


@dataclass(frozen=True)
class TreeProvenance:
    """Holds the drafter for which the tree was searched."""

    drafter_stamp: str | None = None


@dataclass(frozen=True)
class TreeFile:
    """Holds the content of a tree file: parents and ranks, or rank paths (`choices` or `medusa_choices`)."""

    parents: list[int] | None = None
    ranks: list[int] | None = None
    choices: list[list[int]] | None = None
    medusa_choices: list[list[int]] | None = None
    provenance: TreeProvenance = TreeProvenance()

    def tree(self) -> Tree:
        """Returns the tree; raises ValueError if the file holds none."""
        if self.parents is not None and self.ranks is not None:
            return Tree(tuple(self.parents), tuple(self.ranks))
        paths = self.choices if self.choices is not None else self.medusa_choices
        if paths is None or not all(paths):
            raise ValueError("neither parents and ranks nor a list of paths")
        return Tree.from_choices(paths)


def load_tree(path: Path) -> Tree:
    """Reads a tree from {"parents", "ranks"}, {"choices": [[...]]} or a bare list of choices.

    Raises UserError for other files, and for trees of more than MAX_NODES nodes.
    """
    try:
        tree = _read(path).tree()
    except ValueError as reason:
        raise UserError(f"the tree {path} cannot be used: {reason}", REMEDY) from reason
    if tree.size > MAX_NODES:
        raise UserError(f"the tree {path} has {tree.size:,} nodes", f"use {MAX_NODES:,} at most")
    return tree


def tree_provenance(path: Path) -> TreeProvenance:
    """Reads the provenance of a tree file; a bare list of choices has none."""
    return _read(path).provenance


def _read(path: Path) -> TreeFile:
    data = read_json(Path(path), "the tree")
    return convert(
        {"choices": data} if isinstance(data, list) else data, TreeFile, f"the tree {path}", REMEDY
    )
