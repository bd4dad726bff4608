"""Trees: what is derived from parents, search against brute force, dynamic trees, files, drawings, budgets."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.decode import step_times
from medusa_cli.decode.ngram import add_paths
from medusa_cli.decode.step_times import measure_step_times
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import write_json
from medusa_cli.tree import DynamicTree, Prices, Tree, TreeBuilder
from medusa_cli.tree.draw import draw_picture, draw_terminal
from medusa_cli.tree.io import load_tree, save_tree
from medusa_cli.tree.search import (
    StepTimes,
    TimedTree,
    budgets,
    expected_length,
    interpolate,
    largest,
    search,
)
from medusa_cli.tree.tensors import GrowingTrees, outline
from medusa_cli.tree.tree import PADDING, unread_draft
from tests.helpers import medusa, save_model, save_run, tiny_backbone
from tests.test_drafters import drafter_of

#      0
#    1   2
#   3 4  5
#   6
SMALL = Tree((-1, 0, 0, 1, 1, 2, 3), (0, 0, 1, 0, 2, 1, 0))


def test_shape_is_derived_from_the_parents() -> None:
    assert SMALL.size == 7
    assert SMALL.max_depth == 3
    assert SMALL.depth.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert SMALL.children == ((1, 2), (3, 4), (5,), (6,), (), (), ())
    assert SMALL.leaves == (4, 5, 6)
    assert SMALL.path(6) == [0, 1, 3, 6]
    assert SMALL.widths == (2, 3, 1)
    assert SMALL.choices == [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 0]]
    for node in range(SMALL.size):  # a node sees its ancestors and itself
        assert torch.nonzero(SMALL.mask[node]).flatten().tolist() == sorted(SMALL.path(node))
    assert Tree.from_choices(SMALL.choices[::-1]).choices == SMALL.choices
    assert Tree.dense([2, 3]).size == 1 + 2 + 6
    assert Tree.dense([2, 3]).truncate(1) == Tree.dense([2])
    assert Tree.chain(3).parents == (-1, 0, 1, 2)
    assert Tree.chain(0).parents == Tree.root_only().parents == (-1,)


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [((), ()), ((0,), (0,)), ((-1, 2, 0), (0, 0, 0)), ((-1, 0), (0,)), ((-1, 0), (10**30, 0))],
)
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
        nodes = {(), *chosen}
        if all(path[:-1] in nodes for path in chosen):
            best = max(best, expected_length(Tree.from_choices(chosen), accuracies))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 4, 6])
def test_the_search_is_optimal(seed: int, budget: int) -> None:
    chance = random.Random(seed)
    # Unsorted on purpose: a measured accuracy may rise with the rank.
    accuracies = [[chance.random() * 0.6 for _ in range(3)] for _ in range(2)] + [[chance.random()]]
    tree = search(accuracies, budget)
    assert tree.size == budget
    assert expected_length(tree, accuracies) == pytest.approx(brute_force(accuracies, budget))


def test_expected_length_counts_the_bonus_token_and_every_path() -> None:
    accuracies = [[0.5, 0.2], [0.4]]
    tree = Tree.from_choices([[0], [1], [0, 0]])
    assert expected_length(tree, accuracies) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)


@pytest.mark.parametrize("budget", [0, -3, 8])
def test_an_impossible_budget_is_refused(budget: int) -> None:
    accuracies = [[0.5, 0.2], [0.4, 0.1]]
    assert largest(accuracies) == 7
    with pytest.raises(UsageError, match=f"budget {budget} .*1 to 7"):
        search(accuracies, budget)


def random_chances(seed: int, depth: int, width: int) -> dict[tuple[int, ...], float]:
    """Returns a random chance, given its parent, for every path of ranks."""
    source, chances = random.Random(seed), dict[tuple[int, ...], float]()
    for length in range(depth):
        for above in itertools.product(range(width), repeat=length):
            row = sorted((source.random() / 2 for _ in range(width)), reverse=True)
            chances |= {(*above, rank): value for rank, value in enumerate(row)}
    return chances


def grow_on_host(
    limits: DynamicTree, chances: dict[tuple[int, ...], float]
) -> tuple[Tree, list[int]]:
    """Grows a tree over these chances; a node's token is its path of ranks, read as a number after a 1."""
    builder, nodes = TreeBuilder(limits, 1), [0]
    for _ in range(limits.max_depth):
        paths = [tuple(map(int, str(builder.tokens[node])[1:])) for node in nodes]
        log_p = [
            [math.log(chances[(*path, rank)]) for rank in range(limits.width)] for path in paths
        ]
        tokens = [
            [10 * builder.tokens[node] + rank for rank in range(limits.width)] for node in nodes
        ]
        nodes = builder.extend(nodes, log_p, tokens)
    return builder.tree(limits.budget)


def outlined(
    limits: DynamicTree,
    paths: list[list[int]],
    rows: int,
    kind: type[GrowingTrees] = GrowingTrees,
) -> GrowingTrees:
    """Returns a tree that is to grow beside paths of known tokens, in a number of rows."""
    draft = add_paths(unread_draft(1, outline(limits)), paths)
    tree, rest = draft.tree, rows - draft.tree.size
    fields = [
        (*tree.depths, *[0] * rest),
        (*tree.parents, *[PADDING] * rest),
        (*tree.ranks, *[0] * rest),
    ]
    mask = torch.eye(rows, dtype=torch.bool)
    mask[: tree.size, : tree.size] = tree.mask
    nodes = torch.tensor([*fields, (*draft.ids, *[0] * rest)])
    return kind(limits, nodes[None], mask[None])


def grow_tensors(
    limits: DynamicTree, chances: dict[tuple[int, ...], float], *paths: list[int]
) -> tuple[Tree, list[int]]:
    """Grows the tree of `grow_on_host` by tensors, beside paths of known tokens."""
    trees, width = outlined(limits, list(paths), limits.budget + 9), limits.width
    for head in range(limits.max_depth):
        tokens = trees.tokens[0].tolist()
        ranks = [tuple(map(int, str(token)[1:])) for token in tokens]
        log_p = [
            [math.log(chances.get((*path, rank), 0.9)) for rank in range(width)] for path in ranks
        ]
        ids = [[10 * token + rank for rank in range(width)] for token in tokens]
        trees.extend(head, torch.tensor([log_p]), torch.tensor([ids]))
    size = int((trees.parents != PADDING).sum())
    tree = Tree(tuple(trees.parents[0, :size].tolist()), tuple(trees.ranks[0, :size].tolist()))
    assert trees.depth[0, :size].tolist() == list(tree.depths)
    assert torch.equal(trees.mask[0, :size, :size], tree.mask)
    assert not trees.mask[0, :size, size:].any()
    assert (trees.parents[0, size:] == PADDING).all()
    assert not trees.depth[0, size:].any()
    return tree, trees.tokens[0, :size].tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 5, 12, 40])
def test_dynamic_trees_hold_the_most_likely_paths(seed: int, budget: int) -> None:
    chances = random_chances(seed, 3, 3)
    value = {path: math.prod(chances[path[: i + 1]] for i in range(len(path))) for path in chances}
    best = sorted(value, key=lambda path: -value[path])[: budget - 1]
    limits = DynamicTree(budget, 3, width=3)
    tree, tokens = grow_on_host(limits, chances)
    assert sorted(map(tuple, tree.choices)) == sorted(best)
    assert tokens == [1, *(int("1" + "".join(map(str, path))) for path in tree.choices)]
    assert grow_tensors(limits, chances) == (tree, tokens)


@pytest.mark.parametrize("seed", range(8))
def test_a_growing_tree_has_the_size_that_pays_most(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chances = [
        sorted(torch.rand(count, generator=generator).tolist(), reverse=True) for count in (9, 4, 0)
    ]
    costs = [0.0, *torch.rand(7, generator=generator).cumsum(0).tolist()]
    prices = Prices(tuple(costs), (), ())
    profits = [
        sum(sum(own[: size - 1]) for own in chances) - costs[size - 1] for size in range(1, 9)
    ]
    assert prices.best_size(chances) == 1 + profits.index(max(profits))


def test_a_level_is_drafted_if_its_nodes_pay_for_it() -> None:
    passes = (0.0, 0.1, 0.2, 0.4)

    def worth(
        *chances: list[float], level: float, size: int = 2, head: int = 1
    ) -> list[list[bool]]:
        return Prices(passes, (0.3, 0.3 + level), (0.9, 0.5)).worth_extending(head, size, chances)

    # A child of the first node is worth 0.4, of the second 0.1, and a row costs 0.1.
    assert worth([0.8, 0.2], level=0.25) == [[True, False]]
    assert worth([0.8, 0.2], level=0.35) == [[False, False]]
    # In a batch, a row for each costs as much in all, and the level is shared.
    assert worth([0.8], [0.2, 0.05], level=0.35) == [[True], [True, False]]
    assert worth([0.8], level=0.0, size=3) == [[True]]
    assert worth([0.3], level=0.0, size=3) == [[False]]
    # There are no prices beyond the largest pass, nor levels beyond the last head.
    assert worth([1.0], level=0.0, size=4) == worth([1.0], level=0.0, head=2) == [[False]]


def test_matched_tokens_take_the_cheapest_rows() -> None:
    beside = Prices((0.0, 0.1, 0.2, 0.6, 1.0), (), ()).with_rows(2)
    assert beside.best_size([[0.5, 0.3]]) == 2  # rows cost 0.4 now
    assert Prices((0.0, 0.1), (), ()).with_rows(2).best_size([[0.9]]) == 1


@pytest.mark.parametrize(
    "paths", [[[5, 7, 8], [5, 9]], [[10, 100, 1000, 6]]], ids=["others", "the same"]
)
def test_dynamic_trees_grow_beside_known_tokens(paths: list[list[int]]) -> None:
    limits, chances = DynamicTree(6, 3, width=3), random_chances(1, 3, 3)
    alone, tokens = grow_tensors(limits, chances)
    beside, all_tokens = grow_tensors(limits, chances, *paths)
    held = [[all_tokens[node] for node in beside.path(leaf)[1:]] for leaf in range(1, beside.size)]
    assert all(path in held for path in paths)
    assert beside.size == alone.size + 4
    assert all(
        [tokens[node] for node in alone.path(leaf)[1:]] in held for leaf in range(1, alone.size)
    )


def test_equal_guesses_leave_no_node_without_its_parent() -> None:
    trees = outlined(DynamicTree(4, 3, width=2), [], 5)
    for head in range(3):
        trees.extend(head, torch.zeros(1, 5, 2), torch.ones(1, 5, 2, dtype=torch.long))
    assert trees.parents[0].tolist() == [-1, 0, 0, 1, PADDING]
    assert trees.depth[0].tolist() == [
        0,
        1,
        1,
        2,
        0,
    ]


def test_files_hold_trees_in_three_forms(tmp_path: Path) -> None:
    save_tree(tmp_path / "a.json", SMALL, {"version": "x"})
    assert load_tree(tmp_path / "a.json") == SMALL
    (tmp_path / "b.json").write_text(json.dumps(SMALL.choices))
    (tmp_path / "c.json").write_text(json.dumps({"choices": SMALL.choices}))
    assert (
        load_tree(tmp_path / "b.json").choices
        == load_tree(tmp_path / "c.json").choices
        == SMALL.choices
    )


@pytest.mark.parametrize("text", [
    '{"x": 1}', "[[]]", '[["a"]]', "[[0, 1]]", "3", "", "[[0", '{"parents": [0], "ranks": [0]}',
    '{"parents": [-1, 0], "ranks": [0, -1]}', '{"parents": [-1, 0], "ranks": [0, 1.5]}',
    '{"parents": [-1, 0], "ranks": [0, "1"]}', '{"parents": [-1, 0.0], "ranks": [0, 1]}',
    json.dumps([[rank] for rank in range(8000)]),
])  # fmt: skip
def test_broken_tree_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match="tree"):
        load_tree(tmp_path / "t.json")


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_drawings_show_every_node(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tree.{suffix}"
    draw_picture(SMALL, path, [[0.5, 0.2], [0.4, 0.2, 0.1], [0.3]])
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as shown:
        console.print(draw_terminal(SMALL, [[0.5, 0.2], [0.4, 0.2, 0.1], [0.3]]))
    assert shown.get().count("guess") == SMALL.size - 1


ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.1, 0.05, 0.01]]


def costs_of(slope: float, each_level: float = 0.0) -> StepTimes:
    """A machine on which a row costs `slope` seconds more than 10 ms, and a level of drafting so many."""
    verify = {n: 0.01 + slope * (n - 1) for n in (1, 8, 20, 30)}
    return StepTimes(verify, {level: each_level * level for level in (1, 2, 3)})


def best(costs: StepTimes) -> TimedTree:
    """The budget, of any size, that gives most tokens a second."""
    return max(budgets(ACCURACIES, costs), key=lambda budget: budget.tokens_per_s)


def test_costs_are_interpolated_between_measured_sizes() -> None:
    points = {1: 0.010, 9: 0.018, 17: 0.050}
    expected = [0.010, 0.014, 0.018, 0.034, 0.05, 0.082]  # beyond the last, on its slope
    assert [interpolate(points, n) for n in (1, 5, 9, 13, 17, 25)] == pytest.approx(expected)
    assert interpolate({1: 0.02, 4: 0.01}, 9) == 0.01  # noise makes no step cheaper and cheaper
    costs = StepTimes(points, {1: 0.001, 3: 0.005})
    assert costs.step(9, 2) == pytest.approx(0.021)
    assert costs.step(1, 0) == 0.010
    assert costs.step(3, 3, batch=3) == pytest.approx(0.018 + 0.005)  # nine rows in one pass


@pytest.mark.quick("0.0")
@pytest.mark.parametrize("slope", [0.0, 0.0003, 0.002, 0.2])
def test_the_best_budget_is_the_best_of_all_sizes(slope: float) -> None:
    costs = costs_of(slope)
    chosen = best(costs)
    shown = budgets(ACCURACIES, costs)
    rates = [
        expected_length(search(ACCURACIES, n), ACCURACIES) / interpolate(costs.verify, n)
        for n in [size.tree.size for size in shown]
    ]
    assert chosen.tokens_per_s == pytest.approx(max(rates))
    assert [size.tree.size for size in shown] == [*range(1, 21), 24, 28]
    if slope == 0.0:
        assert chosen.tree.size == 28
    if slope == 0.2:
        assert chosen.tree.size == 1


def test_expensive_levels_make_shallow_trees() -> None:
    assert best(costs_of(0.0001)).tree.max_depth == 3
    dear = best(costs_of(0.0001, each_level=0.006))
    assert dear.tree.max_depth == 1
    assert 1 < dear.tree.size <= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "hydra-draft", "amphista", "firp"])
def test_costs_are_measured_for_every_size_and_depth(kind: str) -> None:
    backbone, shown, sizes = tiny_backbone(layers=6), list[Any](), (1, 2, 5)
    drafter = drafter_of(backbone, kind)
    costs = measure_step_times(
        backbone,
        drafter,
        context=20,
        rounds=2,
        sizes=sizes,
        show=lambda *event: shown.append(event),
    )
    assert sorted(costs.verify)[:3] == [1, 2, 5]
    assert sorted(costs.draft) == list(range(1, drafter.num_heads + 1))
    assert all(seconds > 0 for seconds in (*costs.verify.values(), *costs.draft.values()))
    assert [done for _, done, *_ in shown] == list(range(1, len(shown) + 1))
    assert len(shown) >= 3 * (len(sizes) + drafter.num_heads)


def test_timing_needs_no_memory_for_the_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone(positions=1 << 17)
    whole = backbone.max_positions * backbone.engine.row_bytes
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: whole // 8)
    costs = measure_step_times(backbone, drafter_of(backbone, "medusa"), rounds=1, sizes=(1, 2))
    assert costs.verify[1] > 0


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.slow
def test_budget_auto_finds_a_size_and_keeps_the_times(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run", save_model(tmp_path / "model"))
    write_json(run.calibration_path, {"accuracies": ACCURACIES, "heads": 3})
    words = ["tree", "--run", run.path, "--budget", "auto"]
    timed: list[int] = []
    measure = step_times.measure_step_times

    def count(*given: Any, **more: Any) -> StepTimes:
        timed.append(1)
        return measure(*given, **more)

    monkeypatch.setattr(step_times, "measure_step_times", count)
    report = json.loads(medusa(*words, "--json").stdout)
    assert len(timed) == 1
    assert report["nodes"] == report["budgets"][0]["nodes"] == len(report["parents"])
    assert [row["nodes"] for row in report["budgets"][1:]][:3] == [1, 4, 8]
    assert (
        report["budgets"][0]["tokens_per_s"]
        >= max(row["tokens_per_s"] for row in report["budgets"]) * 0.999
    )
    kept = (own_home / "timings.json").read_bytes()
    again = medusa(*words)
    assert len(timed) == 1
    assert "tokens/s" in again.stdout
    assert (own_home / "timings.json").read_bytes() == kept
    medusa(*words, "--measure")
    assert len(timed) == 2
    assert (own_home / "timings.json").read_bytes() != kept
    monkeypatch.setattr("medusa_cli.engine.timing.__version__", "another")
    medusa(*words)
    assert len(timed) == 3
