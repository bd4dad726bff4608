"""Dynamic trees: the best nodes by confidence against brute force, within every limit, and still lossless."""

import itertools
import math
import random

import pytest
import torch

from medusa_cli.drafters import Draft, HydraHeads, NewTokens
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree, TreeBuilder
from tests.helpers import FAMILIES, drafted, generate, generate_plain, medusa_drafter, tiny_backbone
from tests.test_amphista import amphista
from tests.test_firp import firp
from tests.test_hydra import hydra

PROMPT = [5, 9, 20, 11, 7]


def hydra_plus(backbone: Backbone) -> HydraHeads:
    return hydra(backbone, prefix=1)


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


@pytest.mark.parametrize("make", [medusa_drafter, hydra, hydra_plus, amphista, firp])
def test_drafts_hold_the_heads_best_guesses_and_respect_budget_and_depth(make) -> None:
    backbone = tiny_backbone()
    heads = make(backbone)
    ahead = torch.randn(3, backbone.hidden_size)  # what FIRP drafts from
    confirmed = NewTokens(torch.arange(1), torch.randn(1, backbone.hidden_size), 5, 0, ahead)

    def anew(shape: Tree | DynamicTree) -> Draft:
        heads.truncate(0)
        return drafted(heads, backbone, confirmed, shape)

    for budget, depth in itertools.product((1, 2, 9, 30), (0, 1, 3)):
        draft = anew(DynamicTree(budget, depth))
        assert draft.tree.size <= budget and draft.tree.max_depth <= depth and draft.tokens[0] == 5
        assert len(draft.tokens) == draft.tree.size
        # The same tree drafted as a static one holds the same tokens.
        assert torch.equal(anew(draft.tree).tokens, draft.tokens)
    hot, cold = (anew(DynamicTree(9, 3, temperatures=(heat, heat, heat))) for heat in (50.0, 0.05))
    # Sure of themselves, heads go deep; unsure, they go wide.
    assert cold.tree.max_depth > hot.tree.max_depth or max(hot.tree.widths) > max(cold.tree.widths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [medusa_drafter, hydra, hydra_plus, amphista])
def test_dynamic_trees_are_lossless(family: str, make) -> None:
    backbone: Backbone = tiny_backbone(family)
    steps = generate(backbone, make(backbone), DynamicTree(9, 3), PROMPT, max_new_tokens=50, stop_ids=())
    plain = generate_plain(backbone, PROMPT, max_new_tokens=50, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


def test_near_the_end_of_the_context_trees_grow_less_deep() -> None:
    backbone = tiny_backbone(positions=24)
    steps = generate(backbone, hydra(backbone), DynamicTree(9, 3), PROMPT, max_new_tokens=19, stop_ids=())
    plain = generate_plain(backbone, PROMPT, max_new_tokens=19, stop_ids=())
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]
