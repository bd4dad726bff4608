"""What the text repeats is drafted, too: found as by brute force, trusted as it comes true, and never in the output."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from medusa_cli.api import ngrams_alone
from medusa_cli.decode import AdaptivePolicy, DraftPolicy, NgramPolicy, Sampling, Step
from medusa_cli.decode.ngram import (
    MAX_BRANCHES,
    MAX_LENGTH,
    MAX_POSITIONS,
    MAX_TOKENS,
    OTHER,
    PRIOR_BY_LENGTH,
    NgramIndex,
    NgramTrust,
    add_paths,
)
from medusa_cli.decode.policy import DynamicTreePolicy, SizedTree, StaticTreePolicy
from medusa_cli.drafters.base import Draft
from medusa_cli.errors import UsageError
from medusa_cli.tree import DynamicTree, Tree
from medusa_cli.tree.search import Costs, node_values, search
from tests.helpers import tiny_backbone

# Text that repeats itself, which tiny models of random weights rarely write by themselves.
ROUND = [5, 9, 20, 11, 7, 33, 40, 12] * 4
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.1], [0.3, 0.1]]
CHEAP = Costs({1: 0.010, 2: 0.0101, 32: 0.0105}, {1: 0.001, 4: 0.002})
DEAR = Costs({1: 0.010, 2: 0.020, 32: 0.320}, {1: 0.001, 4: 0.002})


def past() -> NgramIndex:
    return NgramIndex(NgramTrust())


def begin(policy: DraftPolicy, tokens: list[int], root: int, sampling: Sampling | None = None) -> SimpleNamespace:
    """Returns what a policy reads of a sequence with this text."""
    return SimpleNamespace(draft=policy.begin(sampling or Sampling()), tokens=tokens, root=root)


def record(policy: NgramPolicy, text: SimpleNamespace, accepted: list[int]) -> None:
    """Lets a policy learn from a step that gave these tokens, the bonus token last."""
    after = SimpleNamespace(draft=text.draft, tokens=[*text.tokens, text.root, *accepted[:-1]], root=accepted[-1])
    policy.record([after], [Step(accepted, path=tuple(range(len(accepted))), nodes=1, looked_up=1)])


def by_hand(text: list[int]) -> list[tuple[int, list[int]]]:
    """The length of each repetition of the text's end among the latest places, and what may follow it, best first."""

    def length(end: int) -> int:
        return max((n for n in range(1, MAX_LENGTH + 1) if n <= end and text[end - n : end] == text[-n:]), default=0)

    ends = [[end for end in range(n, len(text)) if text[end - n : end] == text[-n:]][-MAX_POSITIONS:] for n in (1, 2)]
    found: dict[int, tuple[int, list[int]]] = {}
    for end in sorted({*ends[0], *ends[1]}, key=lambda one: (length(one), one), reverse=True):
        copied = list(text)
        for step in range(MAX_TOKENS):
            copied.append(copied[end + step])
        found.setdefault(text[end], (length(end), copied[len(text) :]))
    return list(found.values())[:MAX_BRANCHES]


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
            kinds = [max(least for least in PRIOR_BY_LENGTH if least <= expected[0][0])] + [OTHER] * (len(expected) - 1)
            assert [match.length for match in found] == kinds
            assert found[0].chance == PRIOR_BY_LENGTH[kinds[0]]
    assert most == MAX_BRANCHES


def test_nothing_is_found_where_nothing_is_repeated_and_circles_go_on() -> None:
    assert past().find([1, 2, 3], 4) == [] and past().find([1], 2) == []
    assert [echo.tokens for echo in past().find([7, 7, 7], 7)] == [(7,) * MAX_TOKENS]
    assert past().find([1, 2, 3, 1, 2], 3)[0].tokens[:7] == (1, 2, 3, 1, 2, 3, 1)


def test_trust_follows_what_is_accepted() -> None:
    policy = NgramPolicy(StaticTreePolicy(search(ACCURACIES, 8), ACCURACIES))
    text = begin(policy, [1, 2, 3, 4, 5, 6, 1], 2)
    for accepted, better in (([3, 4, 5, 6, 1, 9], True), ([9], False)):
        [(_, [path])] = policy.next([text])
        before = text.draft.ngrams.find(text.tokens, 2)[0].chance
        assert path[:1] == (3,)
        record(policy, text, accepted)
        assert (text.draft.ngrams.find(text.tokens, 2)[0].chance > before) is better
    other = policy.begin(Sampling("exact", 1.0))  # another kind of sampling knows nothing of it
    assert other.ngrams is not None and other.ngrams.find(text.tokens, 2)[0].chance == PRIOR_BY_LENGTH[2]


def test_a_tree_keeps_its_size_and_its_likeliest_nodes() -> None:
    tree = search(ACCURACIES, 10)
    policy, values = NgramPolicy(StaticTreePolicy(tree, ACCURACIES)), node_values(tree, ACCURACIES)
    text = begin(policy, [5, 9, 20, 11, 7, 9, 33, 5], 9)  # matches of 5 9, and of 9 alone
    [(fewer, paths)] = policy.next([text])
    count = sum(map(len, paths))
    assert isinstance(fewer, Tree) and len(paths) == 2 and fewer.size + count == tree.size
    assert sorted(node_values(fewer, ACCURACIES), reverse=True) == sorted(values, reverse=True)[: fewer.size]
    matches = text.draft.ngrams.find(text.tokens, 9)
    added = [
        match.chance**level for match, path in zip(matches, paths, strict=False) for level in range(1, len(path) + 1)
    ]
    assert min(added) >= max(sorted(values)[:count])
    assert policy.next([begin(policy, [1, 2, 3], 4)]) == [(tree, [])]


def test_a_dynamic_tree_shares_its_budget() -> None:
    tree = DynamicTree(12, 3)
    policy = NgramPolicy(DynamicTreePolicy(tree))
    [(fewer, [path])] = policy.next([begin(policy, ROUND, ROUND[0])])
    assert path and fewer == replace(tree, budget=12 - len(path)) and len(path) <= 6


def test_a_graft_adds_paths_and_nothing_twice() -> None:
    tree = Tree.from_choices([[0], [1], [0, 0]])  # nodes 1 and 2 below the root, 3 below 1
    draft = Draft(torch.tensor([9, 4, 5, 6]), tree)
    assert add_paths(draft, []) is draft
    there = add_paths(draft, [(4, 6)])
    assert there.tree == tree and there.looked_up == 2
    more = add_paths(draft, [(4, 7, 8), (4, 7, 1)])
    assert more.tokens.tolist() == [9, 4, 5, 6, 7, 8, 1] and more.tree.parents == (-1, 0, 0, 1, 1, 4, 4)
    assert len({tuple(path) for path in more.tree.choices}) == 6  # every node has a path of its own
    beside = add_paths(Draft(torch.tensor([9]), Tree.root_only()), [(1, 2)])
    assert beside.tree == Tree.chain(2) and beside.looked_up == 2


def test_a_pace_drafts_as_many_as_pay() -> None:
    tree = search(ACCURACIES, 4)
    for costs, fewest, most in ((CHEAP, 8, MAX_TOKENS), (DEAR, 0, 0)):
        pace = AdaptivePolicy([SizedTree(tree, 1.7)], costs)
        pace.choose([pace.begin(Sampling()).acceptance])
        [(_, sure)] = pace.weigh_matches([0.95], MAX_TOKENS)
        assert fewest <= sure <= most
        assert pace.weigh_matches([0.01], MAX_TOKENS) == [(pace.choose([]), 0)]
    # Where the text is nearly sure to go on as before, the drafter need not be asked.
    slow = Costs({1: 0.010, 32: 0.020}, {1: 0.010, 4: 0.030})
    assert AdaptivePolicy([SizedTree(tree, 1.7)], slow).weigh_matches([0.97], MAX_TOKENS)[0][0] == Tree.root_only()


# A row costs a fifth of a pass.
ROWS_COST = Costs({1: 0.010, 2: 0.012, 64: 0.136}, {1: 0.0001, 4: 0.0004})


@pytest.mark.parametrize("shares", [[0.0, 0.9, 0.0, 0.5], [0.95] * 4, [0.3, 0.4, 0.0, 0.0], [0.0] * 4], ids=str)
@pytest.mark.parametrize("costs", [CHEAP, ROWS_COST, DEAR], ids=["cheap", "rows", "dear"])
@pytest.mark.parametrize("sizes", [[], [SizedTree(search(ACCURACIES, 8), 2.2)]], ids=["alone", "tree"])
def test_side_by_side_what_all_draft_together_pays_best(
    sizes: list[SizedTree], costs: Costs, shares: list[float]
) -> None:
    """Against every way to widen the pass: each text then drafts what settles most of it in as many rows."""
    pace = AdaptivePolicy(sizes, costs)
    now = pace.choose([pace.begin(Sampling()).acceptance for _ in shares])

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
        for rows in range(max(trees), now.size + MAX_TOKENS + 1):
            each = [[(n, min(rows - n, MAX_TOKENS) if share else 0) for n in trees] for share in shares]
            every.append([max(one, key=lambda at, s=s: tokens(s, *at)) for s, one in zip(shares, each, strict=True)])
    found = [(tree.size, count) for tree, count in pace.weigh_matches(shares, MAX_TOKENS)]
    assert all(share or not count for share, (_, count) in zip(shares, found, strict=True))
    assert rate(found) >= 0.96 * max(map(rate, every)) and rate(found) >= rate([(now.size, 0)] * len(shares))


def test_matches_of_one_sequence_do_not_hide_the_acceptance_of_another() -> None:
    policy = AdaptivePolicy([SizedTree(search(ACCURACIES, 8), 2.2)], CHEAP)
    texts = [begin(policy, [], 0), begin(policy, [], 0)]
    for _ in range(60):
        nodes = policy.next(texts)[0][0].size
        repeats = Step([1] * 9, 8, 8, 0.001, 0.005, path=tuple(range(9)), nodes=9, looked_up=8)
        policy.record(texts, [repeats, Step([1], nodes - 1, 0, 0.001, 0.005, path=(0,), nodes=nodes)])
    assert texts[1].draft.acceptance.ratio < 0.1 and texts[0].draft.acceptance.ratio == 1.0


def test_forks_share_what_is_known_and_not_their_sequences() -> None:
    tree = search(ACCURACIES, 8)
    policy = NgramPolicy(AdaptivePolicy([SizedTree(tree, 2.2)], CHEAP))
    first, second = policy.fork(), policy.fork()
    texts = [(fork.over, begin(fork.over, [], 0), share) for fork, share in ((first, 0), (second, 1))]
    for _ in range(300):  # nothing is accepted in the first text, everything in the second
        for over, text, share in texts:
            [(drafted, _)] = over.next([text])
            accepted = share * drafted.max_depth
            path = tuple(range(accepted + 1))
            new = Step([1] * (accepted + 1), drafted.size - 1, accepted, 0.0, 0.01, path=path, nodes=drafted.size)
            over.record([text], [new])
    assert first.over.size == 1 and second.over.size == tree.size
    for _ in range(40):
        first._trust_of(Sampling()).update(4, 16, 0)
    assert NgramIndex(second._trust_of(Sampling()))._trust.ratio(4) < PRIOR_BY_LENGTH[4]


def test_matches_that_failed_for_long_are_drafted_again_once_they_are_right() -> None:
    policy = NgramPolicy(AdaptivePolicy([], CHEAP))
    text = begin(policy, ROUND, ROUND[0])

    def drafted(right: bool) -> int:
        [(_, paths)] = policy.next([text])
        record(policy, text, [ROUND[1] if right else 63])
        return sum(map(len, paths))

    assert drafted(False) and not [drafted(False) for _ in range(60)][-1]
    assert [drafted(True) for _ in range(60)][-1]


def test_lookups_are_refused_where_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cli.api.captures", lambda engine: True)
    with pytest.raises(UsageError, match="leave out lookup and the method lookup"):
        ngrams_alone(tiny_backbone())
