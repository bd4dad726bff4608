"""Trees on disk: this tool's JSON, and the reference's medusa_choices lists."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.reading import convert, read_json
from medusa_cli.tree.tree import Tree

REMEDY = "make one with `medusa tree`, or give a list of rank paths"
# A step runs all nodes at once, and the mask is a square of them: nothing gains from more anywhere.
MOST_NODES = 1024


def save_tree(path: Path, tree: Tree, provenance: dict[str, Any]) -> None:
    """Write a tree with what made it, atomically."""
    write_json(path, {**tree.to_json(), "choices": tree.choices, "provenance": provenance})


@dataclass(frozen=True)
class TreeMade:
    """What a tree's file says of its making: the drafter it was searched for, the chance from which on a node pays."""

    drafter_stamp: str | None = None
    break_even: float = 0.0

    def __post_init__(self) -> None:
        if not self.break_even >= 0:
            raise ValueError("break_even is below 0")


@dataclass(frozen=True)
class TreeFile:
    """A tree as parents and ranks, or as a list of paths under one of two names."""

    parents: list[int] | None = None
    ranks: list[int] | None = None
    choices: list[list[int]] | None = None
    medusa_choices: list[list[int]] | None = None
    provenance: TreeMade = TreeMade()

    def tree(self) -> Tree:
        """The tree; ValueError where there is none."""
        if self.parents is not None and self.ranks is not None:
            return Tree(tuple(self.parents), tuple(self.ranks))
        paths = self.choices if self.choices is not None else self.medusa_choices
        if paths is None or not all(paths):
            raise ValueError("neither parents and ranks nor a list of paths")
        return Tree.from_choices(paths)


def load_tree(path: Path) -> Tree:
    """Read a tree: {"parents", "ranks"}, {"choices": [[...]]}, or a bare list of choices; else UserError."""
    found = _read(path)
    try:
        made = found.tree()
    except ValueError as reason:
        raise UserError(f"the tree {path} cannot be used: {reason}", REMEDY) from reason
    if made.size > MOST_NODES:
        raise UserError(f"the tree {path} has {made.size:,} nodes", f"use {MOST_NODES:,} at most")
    return made


def tree_made(path: Path) -> TreeMade:
    """What a tree's file says of its making; a bare list of choices says nothing."""
    return _read(path).provenance


def _read(path: Path) -> TreeFile:
    data = read_json(Path(path), "the tree")
    return convert({"choices": data} if isinstance(data, list) else data, TreeFile, f"the tree {path}", REMEDY)
