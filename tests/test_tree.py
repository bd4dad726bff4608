"""Trees: shapes derived from parents, the search against brute force, files and pictures."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch

from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import DynamicTree, Tree, TreeBuilder
from medusa_cli.tree.draw import draw_picture, draw_terminal
from medusa_cli.tree.search import expected_length, largest, search
from medusa_cli.tree.tree import load_tree, save_tree

#      0
#    1   2
#   3 4  5
#   6
SMALL = Tree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 2, 1, 0))


def test_everything_is_derived_from_the_parents() -> None:
    assert SMALL.size == 7 and SMALL.max_depth == 3
    assert SMALL.depth.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert SMALL.children == ((1, 2), (3, 4), (5,), (6,), (), (), ())
    assert SMALL.leaves == (4, 5, 6)
    assert SMALL.path(6) == [0, 1, 3, 6]
    assert SMALL.widths == (2, 3, 1)
    assert SMALL.choices == [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 0]]


def test_the_mask_is_ancestors_and_self() -> None:
    for node in range(SMALL.size):
        assert torch.nonzero(SMALL.mask[node]).flatten().tolist() == sorted(SMALL.path(node))


def test_choices_round_trip_in_any_order() -> None:
    shuffled = SMALL.choices[:]
    random.Random(0).shuffle(shuffled)
    assert Tree.from_choices(shuffled).choices == SMALL.choices
    assert Tree.from_json(json.loads(json.dumps(SMALL.to_json()))) == SMALL


def test_dense_chain_root_and_cut() -> None:
    assert Tree.dense([2, 3]).size == 1 + 2 + 6
    assert Tree.chain(3).parents == (-1, 0, 1, 2)
    assert Tree.root_only().size == 1 and Tree.root_only().max_depth == 0
    assert Tree.dense([2, 3]).truncate(1) == Tree.dense([2])


@pytest.mark.parametrize(("parents", "ranks"), [((), ()), ((0,), (0,)), ((-1, 2, 0), (0, 0, 0)), ((-1, 0), (0,))])
def test_impossible_shapes_are_refused(parents: tuple, ranks: tuple) -> None:
    with pytest.raises(ValueError):
        Tree(parents, ranks)


def brute_force(accuracies: list[list[float]], budget: int) -> float:
    """The greatest expected length over every parent-closed set of nodes."""
    paths = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(head)) for head in accuracies[:depth]))
    ]
    best = 0.0
    for chosen in itertools.combinations(paths, budget - 1):
        held = {(), *chosen}
        if all(path[:-1] in held for path in chosen):
            best = max(best, expected_length(Tree.from_choices(chosen), accuracies))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 4, 6])
def test_the_search_is_optimal(seed: int, budget: int) -> None:
    chance = random.Random(seed)
    # Unsorted on purpose: a measured accuracy may rise with the rank.
    accuracies = [[chance.random() * 0.6 for _ in range(3)] for _ in range(2)] + [[chance.random()]]
    found = search(accuracies, budget)
    assert found.size == budget
    assert expected_length(found, accuracies) == pytest.approx(brute_force(accuracies, budget))


def test_expected_length_counts_the_own_token_and_every_path() -> None:
    accuracies = [[0.5, 0.2], [0.4]]
    tree = Tree.from_choices([[0], [1], [0, 0]])
    assert expected_length(tree, accuracies) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)


@pytest.mark.parametrize("budget", [0, -3, 8])
def test_a_budget_that_cannot_be_is_named(budget: int) -> None:
    accuracies = [[0.5, 0.2], [0.4, 0.1]]
    assert largest(accuracies) == 7
    with pytest.raises(UsageError, match=f"budget {budget} .*1 to 7"):
        search(accuracies, budget)


def chances(seed: int, depth: int, width: int) -> dict[tuple[int, ...], float]:
    """A made-up chance, given its parent, for every path of ranks."""
    chance = random.Random(seed)
    found: dict[tuple[int, ...], float] = {}
    for length in range(depth):
        for above in itertools.product(range(width), repeat=length):
            row = sorted((chance.random() for _ in range(width)), reverse=True)
            found |= {(*above, rank): value / 2 for rank, value in enumerate(row)}
    return found


def grown(growth: DynamicTree, found: dict[tuple[int, ...], float]) -> tuple[list[list[int]], list[int]]:
    """Grow a tree over these chances; a path of ranks is its own token, read as a number in base 10."""
    growing, nodes, paths = TreeBuilder(growth, 0), [0], {0: ()}
    for _ in range(growth.max_depth):
        rows = [[found[(*paths[node], rank)] for rank in range(growth.width)] for node in nodes]
        tokens = [[int("1" + "".join(map(str, (*paths[n], r)))) for r in range(growth.width)] for n in nodes]
        first = len(growing.tokens)
        above = list(nodes)
        nodes = growing.extend(above, [[math.log(one) for one in row] for row in rows], tokens)
        for node in range(first, len(growing.tokens)):
            paths[node] = (*paths[growing.parents[node]], int(str(growing.tokens[node])[-1]))
    tree, kept = growing.tree()
    return tree.choices, kept


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 5, 12, 40])
def test_the_nodes_are_the_most_likely_paths(seed: int, budget: int) -> None:
    found = chances(seed, 3, 3)
    value = {path: math.prod(found[path[: i + 1]] for i in range(len(path))) for path in found}
    best = sorted(value, key=lambda path: -value[path])[: budget - 1]
    choices, tokens = grown(DynamicTree(budget, 3, width=3), found)
    assert sorted(map(tuple, choices)) == sorted(best)
    assert tokens[1:] == [int("1" + "".join(map(str, path))) for path in choices]


def test_nodes_thought_too_unlikely_are_left_out() -> None:
    found = chances(1, 3, 3)
    value = {path: math.prod(found[path[: i + 1]] for i in range(len(path))) for path in found}
    choices, _ = grown(DynamicTree(64, 3, width=3, min_chance=0.05), found)
    assert sorted(map(tuple, choices)) == sorted(path for path in value if value[path] >= 0.05)


def test_files_hold_trees_in_three_forms(tmp_path: Path) -> None:
    save_tree(tmp_path / "a.json", SMALL, {"version": "x"})
    assert load_tree(tmp_path / "a.json") == SMALL
    (tmp_path / "b.json").write_text(json.dumps(SMALL.choices))
    (tmp_path / "c.json").write_text(json.dumps({"choices": SMALL.choices}))
    assert load_tree(tmp_path / "b.json").choices == load_tree(tmp_path / "c.json").choices == SMALL.choices


@pytest.mark.parametrize(
    "text",
    [
        '{"x": 1}',
        "[[]]",
        '[["a"]]',
        "[[0, 1]]",
        '{"parents": [0], "ranks": [0]}',
        '{"parents": [-1, 0], "ranks": [0, -1]}',
        '{"parents": [-1, 0], "ranks": [0, 1.5]}',
        '{"parents": [-1, 0], "ranks": [0, "1"]}',
        '{"parents": [-1, 0.0], "ranks": [0, 1]}',
        "3",
        "",
        "[[0",
    ],
)
def test_files_that_are_no_tree_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match="tree"):
        load_tree(tmp_path / "t.json")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_and_drawings_show_every_node(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tree.{suffix}"
    draw_picture(SMALL, path, [[0.5, 0.2], [0.4, 0.2, 0.1], [0.3]])
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as shown:
        console.print(draw_terminal(SMALL, [[0.5, 0.2], [0.4, 0.2, 0.1], [0.3]]))
    assert shown.get().count("guess") == SMALL.size - 1
