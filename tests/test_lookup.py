"""What the text repeats is drafted, too: found as by brute force, trusted as it comes true, and never in the output."""

import random
from dataclasses import replace

import pytest
import torch

from medusa_cli.assembly import looked_up
from medusa_cli.decoding import Lookup, Pace, Sampling, Step
from medusa_cli.decoding.lookup import graft
from medusa_cli.decoding.luck import Luck
from medusa_cli.decoding.pace import Size
from medusa_cli.decoding.past import ANOTHER, KNOWN, LONGEST, MOST, PLACES, WAYS, Echo, Past
from medusa_cli.drafters.base import Draft
from medusa_cli.errors import UsageError
from medusa_cli.tree import Growth, Tree
from medusa_cli.tree.budget import Costs
from medusa_cli.tree.search import node_values, search
from tests.tiny import tiny_backbone

# Text that repeats itself, which tiny models of random weights rarely write by themselves.
ROUND = [5, 9, 20, 11, 7, 33, 40, 12] * 4
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.1], [0.3, 0.1]]
CHEAP = Costs({1: 0.010, 2: 0.0101, 32: 0.0105}, {1: 0.001, 4: 0.002})
DEAR = Costs({1: 0.010, 2: 0.020, 32: 0.320}, {1: 0.001, 4: 0.002})


def past() -> Past:
    return Past({kind: Luck(4.0, 4.0 * share) for kind, share in KNOWN.items()})


def by_hand(text: list[int]) -> list[tuple[int, list[int]]]:
    """The length of each repetition of the text's end among the latest places, and what may follow it, best first."""

    def length(end: int) -> int:
        return max((n for n in range(1, LONGEST + 1) if n <= end and text[end - n : end] == text[-n:]), default=0)

    ends = [[end for end in range(n, len(text)) if text[end - n : end] == text[-n:]][-PLACES:] for n in (1, 2)]
    found: dict[int, tuple[int, list[int]]] = {}
    for end in sorted({*ends[0], *ends[1]}, key=lambda one: (length(one), one), reverse=True):
        copied = list(text)
        for step in range(MOST):
            copied.append(copied[end + step])
        found.setdefault(text[end], (length(end), copied[len(text) :]))
    return list(found.values())[:WAYS]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_repetitions_are_found_as_by_hand_however_the_text_came(seed: int) -> None:
    chance = random.Random(seed)
    text, mine, most = [chance.randrange(3 + seed % 4) for _ in range(2)], past(), 0
    while len(text) < 120:
        text += [chance.randrange(3 + seed % 4) for _ in range(chance.randrange(1, 5))]
        found, expected = mine.find(text[:-1], text[-1]), by_hand(text)
        assert [list(echo.tokens) for echo in found] == [tokens for _, tokens in expected]
        most = max(most, len(found))
        if expected:
            kinds = [max(least for least in KNOWN if least <= expected[0][0])] + [ANOTHER] * (len(expected) - 1)
            assert [echo.kind for echo in found] == kinds
            assert mine.share(found[0]) == KNOWN[kinds[0]]
    assert most == WAYS


def test_nothing_is_found_where_nothing_is_repeated_and_circles_go_on() -> None:
    assert past().find([1, 2, 3], 4) == [] and past().find([1], 2) == []
    assert [echo.tokens for echo in past().find([7, 7, 7], 7)] == [(7,) * MOST]
    assert past().find([1, 2, 3, 1, 2], 3)[0].tokens[:7] == (1, 2, 3, 1, 2, 3, 1)


def test_what_comes_true_is_trusted_more_and_what_does_not_less() -> None:
    lookup = Lookup(search(ACCURACIES, 8), ACCURACIES)
    mine, sampling = lookup.begin(Sampling()), Sampling()
    text = [1, 2, 3, 4, 5, 6, 1]
    for settled, better in (([3, 4, 5, 6, 1, 9], True), ([9], False)):
        [(_, [told])] = lookup.beside(lookup.over, [(mine, text, 2)])
        [echo] = mine.find(text, 2)
        before = mine.share(echo)
        assert told[:1] == (3,)
        lookup.learn(mine, sampling, settled)
        assert (mine.share(echo) > before) is better
    other = lookup.begin(Sampling("exact", 1.0))  # another kind of text knows nothing of it
    assert other.share(other.find(text, 2)[0]) == KNOWN[2]


def test_a_tree_keeps_its_size_and_its_likeliest_nodes() -> None:
    tree = search(ACCURACIES, 10)
    lookup, values = Lookup(tree, ACCURACIES), node_values(tree, ACCURACIES)
    mine = lookup.begin(Sampling())
    text = [5, 9, 20, 11, 7, 9, 33, 5]  # what follows 5 and 9, and what followed 9 alone
    [(fewer, told)] = lookup.beside(tree, [(mine, text, 9)])
    count = sum(map(len, told))
    assert isinstance(fewer, Tree) and len(told) == 2 and fewer.size + count == tree.size
    kept = sorted(node_values(fewer, ACCURACIES), reverse=True)
    assert kept == sorted(values, reverse=True)[: fewer.size]
    # What gave way was less likely than what came.
    drafted = zip(mine.find(text, 9), told, strict=False)
    came = [mine.share(echo) ** level for echo, path in drafted for level in range(1, len(path) + 1)]
    assert min(came) >= max(sorted(values)[:count])
    assert lookup.beside(tree, [(lookup.begin(Sampling()), [1, 2, 3], 4)]) == [(tree, [])]


def test_a_growth_grows_fewer_nodes_by_as_many() -> None:
    growth = Growth(12, 3)
    [(fewer, [told])] = Lookup(growth).beside(growth, [(past(), ROUND, ROUND[0])])
    assert told and fewer == replace(growth, budget=12 - len(told)) and len(told) <= 6


def test_a_graft_adds_paths_and_nothing_twice() -> None:
    tree = Tree.from_choices([[0], [1], [0, 0]])  # nodes 1 and 2 below the root, 3 below 1
    draft = Draft(torch.tensor([9, 4, 5, 6]), tree)
    assert graft(draft, []) is draft
    there = graft(draft, [(4, 6)])
    assert there.tree == tree and there.looked_up == 2
    more = graft(draft, [(4, 7, 8), (4, 7, 1)])
    assert more.tokens.tolist() == [9, 4, 5, 6, 7, 8, 1] and more.tree.parents == (-1, 0, 0, 1, 1, 4, 4)
    assert len({tuple(path) for path in more.tree.choices}) == 6  # every node has a path of its own
    beside = graft(Draft(torch.tensor([9]), Tree.root_only()), [(1, 2)])
    assert beside.tree == Tree.chain(2) and beside.looked_up == 2


def test_a_pace_drafts_as_many_as_pay() -> None:
    tree = search(ACCURACIES, 4)
    for costs, fewest, most in ((CHEAP, 8, MOST), (DEAR, 0, 0)):
        pace = Pace([Size(tree, 1.7)], costs)
        pace.choose([pace.begin(Sampling())])
        [(_, sure)] = pace.beside([0.95], MOST)
        assert fewest <= sure <= most
        assert pace.beside([0.01], MOST) == [(pace.choose([]), 0)]
    # Where the text is nearly sure to go on as before, the drafter need not be asked.
    slow = Costs({1: 0.010, 32: 0.020}, {1: 0.010, 4: 0.030})
    assert Pace([Size(tree, 1.7)], slow).beside([0.97], MOST)[0][0] == Tree.root_only()


# A row costs a fifth of a pass.
ROWS_COST = Costs({1: 0.010, 2: 0.012, 64: 0.136}, {1: 0.0001, 4: 0.0004})


@pytest.mark.parametrize("shares", [[0.0, 0.9, 0.0, 0.5], [0.95] * 4, [0.3, 0.4, 0.0, 0.0], [0.0] * 4], ids=str)
@pytest.mark.parametrize("costs", [CHEAP, ROWS_COST, DEAR], ids=["cheap", "rows", "dear"])
@pytest.mark.parametrize("sizes", [[], [Size(search(ACCURACIES, 8), 2.2)]], ids=["alone", "tree"])
def test_side_by_side_what_all_draft_together_pays_best(sizes: list[Size], costs: Costs, shares: list[float]) -> None:
    """Against every way to widen the pass: each text then drafts what settles most of it in as many rows."""
    pace = Pace(sizes, costs)
    now = pace.choose([pace.begin(Sampling()) for _ in shares])

    def tokens(share: float, nodes: int, count: int) -> float:
        came = sum(share**level for level in range(1, count + 1))
        return 1 + came + ((1 - share) if count else 1) * (1.2 if nodes > 1 else 0)

    def rate(found: list[tuple[int, int]]) -> float:
        widest = max(nodes + count for nodes, count in found)
        depth = now.max_depth if any(nodes > 1 for nodes, _ in found) else 0
        gained = sum(tokens(share, *one) for share, one in zip(shares, found, strict=True))
        return gained / costs.step(widest, depth, len(shares))

    every = []
    for trees in ({1}, {1, now.size}):
        for rows in range(max(trees), now.size + MOST + 1):
            each = [[(n, min(rows - n, MOST) if share else 0) for n in trees] for share in shares]
            every.append([max(one, key=lambda at, s=s: tokens(s, *at)) for s, one in zip(shares, each, strict=True)])
    found = [(tree.size, count) for tree, count in pace.beside(shares, MOST)]
    assert all(share or not count for share, (_, count) in zip(shares, found, strict=True))
    assert rate(found) >= 0.96 * max(map(rate, every)) and rate(found) >= rate([(now.size, 0)] * len(shares))


def test_a_text_that_looks_up_does_not_hide_what_comes_of_the_drafts_beside_it() -> None:
    tree = search(ACCURACIES, 8)
    pace = Pace([Size(tree, 2.2)], CHEAP)
    texts = [pace.begin(Sampling()), pace.begin(Sampling())]
    for _ in range(60):
        nodes = pace.choose(texts).size
        repeats = Step([1] * 9, 8, 8, 0.001, 0.005, path=tuple(range(9)), nodes=9, looked_up=8)
        pace.record([repeats, Step([1], nodes - 1, 0, 0.001, 0.005, path=(0,), nodes=nodes)], texts)
    assert texts[1].share < 0.1 and texts[0].share == 1.0


def test_decoders_of_one_model_share_what_is_known_and_not_their_texts() -> None:
    tree = search(ACCURACIES, 8)
    lookup = Lookup(Pace([Size(tree, 2.2)], CHEAP))
    one, other = lookup.fork(), lookup.fork()
    first, second = (half.over.begin(Sampling()) for half in (one, other))
    assert isinstance(one.over, Pace) and isinstance(other.over, Pace)
    for _ in range(300):  # nothing comes true in the first text, everything in the second
        for half, text, share in ((one.over, first, 0), (other.over, second, 1)):
            shape = half.choose([text])
            came = share * shape.max_depth
            path = tuple(range(came + 1))
            half.record([Step([1] * (came + 1), shape.size - 1, came, 0.0, 0.01, path=path, nodes=shape.size)], [text])
    assert one.over.size == 1 and other.over.size == tree.size
    one._of("greedy")[4].learn(100, 0, 1.0)
    assert other.begin(Sampling()).share(Echo((1,), 4)) < KNOWN[4]


def test_what_has_failed_for_long_is_drafted_again_once_it_comes_true() -> None:
    lookup = Lookup(Pace([], CHEAP))
    mine, sampling = lookup.begin(Sampling()), Sampling()
    lookup.over.choose([lookup.over.begin(sampling)])

    def drafted(right: bool) -> int:
        [(_, paths)] = lookup.beside(Tree.root_only(), [(mine, ROUND, ROUND[0])])
        lookup.learn(mine, sampling, [ROUND[1] if right else 63])
        return sum(map(len, paths))

    assert drafted(False) and not [drafted(False) for _ in range(60)][-1]
    assert [drafted(True) for _ in range(60)][-1]


def test_lookups_are_refused_where_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.assembly.captures", lambda engine: True)
    with pytest.raises(UsageError, match="leave out lookup and the method lookup"):
        looked_up(tiny_backbone())
