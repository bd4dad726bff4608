"""Trees on disk: this tool's JSON, and the reference's medusa_choices lists."""

from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.runs.files import write_json
from medusa_cli.runs.reading import read_json
from medusa_cli.tree.tree import Tree


def save_tree(path: Path, tree: Tree, provenance: dict[str, Any]) -> None:
    """Write a tree with what made it, atomically."""
    write_json(path, {**tree.to_json(), "choices": tree.choices, "provenance": provenance})


def load_tree(path: Path) -> Tree:
    """Read a tree: {"parents", "ranks"}, {"choices": [[...]]}, or a bare list of choices; else UserError."""
    data = read_json(Path(path), "the tree")
    try:
        if isinstance(data, dict) and "parents" in data:
            return Tree.from_json(data)
        choices = data.get("choices", data.get("medusa_choices")) if isinstance(data, dict) else data
        if not isinstance(choices, list) or not all(
            isinstance(path, list) and path and all(type(rank) is int for rank in path) for path in choices
        ):
            raise ValueError("neither parents and ranks nor a list of paths")
        return Tree.from_choices(choices)
    except (ValueError, KeyError, TypeError) as reason:
        raise UserError(
            f"the tree {path} cannot be used: {reason}", "make one with `medusa tree`, or give a list of rank paths"
        ) from reason
