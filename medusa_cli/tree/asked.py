"""The tree that is asked for: of a budget of nodes, of a shape, or of a file; and what it asks of the heads."""

from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.accuracies import Heads, check_current
from medusa_cli.runs.run import DEFAULT_RUN
from medusa_cli.tree.saved import MOST_NODES, load_tree
from medusa_cli.tree.search import largest, search
from medusa_cli.tree.tree import Tree

BUDGET = 64


def parse_budget(text: str | None) -> int | None:
    """The number of nodes that is named; UsageError where it is none."""
    try:
        return None if text is None else int(text)
    except ValueError as reason:
        raise UsageError(f"@budget {text!r} is no number of nodes", "give a whole number, or auto") from reason


def parse_shape(text: str) -> list[int]:
    """Widths such as 4,3,2; UsageError unless all are whole, 1 or more, and make a bearable tree."""
    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError as reason:
        raise UsageError(f"@shape {text!r} is no list of numbers", "give widths such as 4,3,2") from reason
    if min(widths) < 1:
        raise UsageError(f"@shape {text!r} has a width below 1", "give widths such as 4,3,2")
    total = level = 1
    for width in widths:
        level *= width
        total += level
        if total > MOST_NODES:
            raise UsageError(f"@shape {text!r} makes more than {MOST_NODES:,} nodes", "give fewer or smaller")
    return widths


def make_tree(
    used: Heads, budget: int | None, widths: list[int] | None, choices: Path | None, source: str, run: str | None
) -> tuple[Tree, dict[str, Any]]:
    """The tree that was asked for, and the setting and value that made it; source: where the heads are from."""
    if widths is not None:
        return Tree.dense(widths), {"shape": widths}
    if choices is not None:
        return load_tree(choices), {"choices": str(choices)}
    if not used.accuracies:
        raise UserError(
            f"{source} has no calibration.json",
            f"run `medusa calibrate --run {run or DEFAULT_RUN}` first, or give @shape 4,3,2",
        )
    check_current(used)
    possible = largest(used.accuracies)
    nodes = min(BUDGET, possible) if budget is None else budget
    if MOST_NODES < nodes <= possible:
        raise UsageError(f"@budget {nodes} is more than one step can verify", f"use 1 to {MOST_NODES:,}")
    return search(used.accuracies, nodes), {"budget": nodes}


def lacks(widths: tuple[int, ...], known: Heads) -> list[str]:
    """What the tree asks of the heads that they do not have, or that was not measured."""
    notes = []
    if known.stale:
        notes.append(f"{known.source} was measured on an earlier drafter of this run: so is the expected length")
    if known.count is not None and len(widths) > known.count:
        notes.append(
            f"the tree is {len(widths)} deep but there are {known.count} heads: these heads cannot fill it; "
            f"@heads {known.count} cuts it"
        )
    for head, (width, row) in enumerate(zip(widths, known.accuracies, strict=False), start=1):
        if width > len(row):
            notes.append(
                f"head {head}: the tree uses {width} guesses, {len(row)} were calibrated; "
                "the others count 0 in the expected length"
            )
    return notes
