"""Drawings of a draft tree, in the terminal and as an image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_cli.files.io import replacing
from medusa_cli.tree.search import Accuracies, node_values
from medusa_cli.tree.tree import Tree

# Probabilities of at least this value are drawn in the strongest color.
STRONG = 0.3


def draw_terminal(tree: Tree, accuracies: Accuracies | None = None) -> Any:
    """Returns a rich renderable that shows each node's guess and, given accuracies, its probability of acceptance."""
    from rich.text import Text
    from rich.tree import Tree as Lines

    values = node_values(tree, accuracies) if accuracies else None
    lines = {0: Lines("root: the token already decided")}
    for node in range(1, tree.size):
        strong = values is not None and values[node] >= STRONG
        label = Text(
            f"head {tree.depths[node]}, guess {tree.ranks[node] + 1}",
            "bold green" if strong else "",
        )
        if values is not None:
            label.append(f"  {values[node]:.1%}", "dim")
        lines[node] = lines[tree.parents[node]].add(label)
    return lines[0]


def draw_picture(tree: Tree, path: Path, accuracies: Accuracies | None = None) -> None:
    """Writes the tree as PNG or SVG, depending on the path's suffix."""
    from matplotlib.figure import Figure

    values = node_values(tree, accuracies) if accuracies else [1.0] * tree.size
    figure = Figure(figsize=(max(6.0, 0.24 * len(tree.leaves)), 1.4 + 0.95 * tree.max_depth))
    axes = figure.subplots()
    draw_nodes(axes, tree, values)
    title = f"{tree.size} nodes, root included; numbers are ranks"
    axes.set_title(
        title + (f"; {sum(values):.2f} tokens per step expected" if accuracies else ""), fontsize=9
    )
    with replacing(Path(path)) as part:
        figure.savefig(
            part, format=Path(path).suffix.lstrip(".").lower(), dpi=160, bbox_inches="tight"
        )


def draw_nodes(axes: Any, tree: Tree, values: Sequence[float]) -> None:
    """Draws a tree on matplotlib axes; a larger value gives a node a stronger color."""
    x = columns(tree)
    for node in range(1, tree.size):
        parent = tree.parents[node]
        ends = [x[parent], x[node]], [-tree.depths[parent], -tree.depths[node]]
        axes.plot(*ends, color="0.6", linewidth=0.6 + 3.0 * values[node], zorder=1)
    shades = [min(1.0, 0.15 + value / STRONG * 0.85) for value in values]
    axes.scatter(
        x,
        [-depth for depth in tree.depths],
        c=shades,
        cmap="viridis_r",
        vmin=0,
        vmax=1,
        s=95,
        zorder=2,
    )
    for node in range(tree.size):
        text = str(tree.ranks[node] + 1) if node else ""
        tint = "white" if shades[node] > 0.45 else "black"
        axes.text(
            x[node], -tree.depths[node], text, ha="center", va="center", fontsize=6, color=tint
        )
    for depth in range(tree.max_depth + 1):
        count = tree.depths.count(depth)
        name = "root"
        if depth:
            name = f"head {depth}: {count} {'nodes' if count > 1 else 'node'}"
        axes.text(min(x) - 1.2, -depth, name, ha="right", va="center", fontsize=8)
    axes.margins(x=0.02, y=0.12)
    axes.axis("off")


def columns(tree: Tree) -> list[float]:
    """Returns each node's horizontal position. Leaves follow the order of paths; parents are centered over children."""
    x = [0.0] * tree.size
    for column, leaf in enumerate(sorted(tree.leaves, key=tree.path)):
        x[leaf] = float(column)
    for node in reversed(range(tree.size)):
        if below := tree.children[node]:
            x[node] = (x[below[0]] + x[below[-1]]) / 2
    return x
