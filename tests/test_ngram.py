"""N-gram matches are found as by brute force, trusted as far as they are accepted, and never change the output."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_cli.decode import AdaptivePolicy, DraftPolicy, Request, Sampling, Step
from medusa_cli.decode.ngram import (
    MAX_BRANCHES,
    MAX_LENGTH,
    MAX_POSITIONS,
    MAX_TOKENS,
    OTHER,
    PRIOR_BY_LENGTH,
    NgramIndex,
    add_paths,
    ngram_trust,
)
from medusa_cli.decode.policy import DynamicTreePolicy, StaticTreePolicy, policy_of
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import provenance
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.search import SizedTree, StepTimes, node_values, search
from tests.helpers import (
    FAMILIES,
    FASTEST,
    PROMPT,
    SPARSE,
    decoder_of,
    generate,
    generate_batch,
    generate_plain,
    medusa,
    save_model,
    save_run,
    tiny_backbone,
    tokens_of,
)
from tests.test_drafters import drafter_of
from tests.test_prefix_cache import KINDS

# Random tiny models rarely repeat themselves.
ROUND = [5, 9, 20, 11, 7, 33, 40, 12] * 4
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.1], [0.3, 0.1]]
TREE = search(ACCURACIES, 8)
CHEAP = StepTimes({1: 0.010, 2: 0.0101, 32: 0.0105}, {1: 0.001, 4: 0.002})
DEAR = StepTimes({1: 0.010, 2: 0.020, 32: 0.320}, {1: 0.001, 4: 0.002})
# A row costs a fifth of a pass.
FIFTH = StepTimes({1: 0.010, 2: 0.012, 64: 0.136}, {1: 0.0001, 4: 0.0004})


def index() -> NgramIndex:
    return NgramIndex(ngram_trust())


def begin(
    policy: DraftPolicy, tokens: list[int], root: int, sampling: Sampling | None = None
) -> SimpleNamespace:
    """Returns what a policy reads of a sequence with this text."""
    return SimpleNamespace(
        draft=policy.begin(sampling or Sampling()),
        tokens=tokens,
        root=root,
        sampler=SimpleNamespace(processors=None),
    )


def record(policy: DraftPolicy, text: SimpleNamespace, accepted: list[int]) -> None:
    """Lets a policy learn from a step that gave these tokens, the bonus token last."""
    after = SimpleNamespace(
        draft=text.draft,
        tokens=[*text.tokens, text.root, *accepted[:-1]],
        root=accepted[-1],
        sampler=SimpleNamespace(processors=None),
    )
    policy.record([after], [Step(accepted, path=tuple(range(len(accepted))), looked_up=1)])


def brute_force(text: list[int]) -> list[tuple[int, list[int]]]:
    """Returns the length of each match among the latest positions, and what may follow it, best first."""

    def length(end: int) -> int:
        return max(
            (n for n in range(1, MAX_LENGTH + 1) if n <= end and text[end - n : end] == text[-n:]),
            default=0,
        )

    ends = [
        [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]][-MAX_POSITIONS:]
        for n in (1, 2)
    ]
    matches: dict[int, tuple[int, list[int]]] = {}
    for end in sorted({*ends[0], *ends[1]}, key=lambda end: (length(end), end), reverse=True):
        copied = list(text)
        for step in range(MAX_TOKENS):
            copied.append(copied[end + step])
        matches.setdefault(text[end], (length(end), copied[len(text) :]))
    return list(matches.values())[:MAX_BRANCHES]


@pytest.mark.parametrize("seed", range(20))
def test_matches_are_those_of_brute_force(seed: int) -> None:
    chance, ngrams, branches = random.Random(seed), index(), 0
    text = [chance.randrange(3 + seed % 4) for _ in range(2)]
    while len(text) < 120:
        text += [chance.randrange(3 + seed % 4) for _ in range(chance.randrange(1, 5))]
        matches, expected = ngrams.find(text[:-1], text[-1]), brute_force(text)
        assert [list(match.tokens) for match in matches] == [tokens for _, tokens in expected]
        branches = max(branches, len(matches))
        if expected:
            longest = max(length for length in PRIOR_BY_LENGTH if length <= expected[0][0])
            assert [match.length for match in matches] == [longest] + [OTHER] * (len(expected) - 1)
            assert matches[0].chance == PRIOR_BY_LENGTH[longest]
    assert branches == MAX_BRANCHES


def test_no_match_without_repetition_and_a_period_goes_on() -> None:
    assert index().find([1, 2, 3], 4) == []
    assert index().find([1], 2) == []
    assert [match.tokens for match in index().find([7, 7, 7], 7)] == [(7,) * MAX_TOKENS]
    assert index().find([1, 2, 3, 1, 2], 3)[0].tokens[:7] == (1, 2, 3, 1, 2, 3, 1)


def test_trust_follows_acceptance() -> None:
    policy = StaticTreePolicy(TREE, ACCURACIES, ngrams=True)
    text = begin(policy, [1, 2, 3, 4, 5, 6, 1], 2)
    for accepted, better in (([3, 4, 5, 6, 1, 9], True), ([9], False)):
        [(_, [path])] = policy.next([text])
        before = text.draft.ngrams.find(text.tokens, 2)[0].chance
        assert path[:1] == (3,)
        record(policy, text, accepted)
        assert (text.draft.ngrams.find(text.tokens, 2)[0].chance > before) is better
    other = policy.begin(Sampling("exact", 1.0))  # another kind of sampling knows nothing of it
    assert other.ngrams.find(text.tokens, 2)[0].chance == PRIOR_BY_LENGTH[2]


def test_failed_matches_are_drafted_again_once_they_are_right() -> None:
    policy = AdaptivePolicy([], CHEAP, ngrams=True)
    text = begin(policy, ROUND, ROUND[0])

    def drafted(right: bool) -> int:
        [(_, paths)] = policy.next([text])
        record(policy, text, [ROUND[1] if right else 63])
        return sum(map(len, paths))

    assert drafted(False)
    assert not [drafted(False) for _ in range(60)][-1]
    assert [drafted(True) for _ in range(60)][-1]


def test_static_tree_keeps_its_size_and_its_likeliest_nodes() -> None:
    tree = search(ACCURACIES, 10)
    policy, values = StaticTreePolicy(tree, ACCURACIES, ngrams=True), node_values(tree, ACCURACIES)
    text = begin(policy, [5, 9, 20, 11, 7, 9, 33, 5], 9)  # matches of 5 9, and of 9 alone
    [(fewer, paths)] = policy.next([text])
    count = sum(map(len, paths))
    assert isinstance(fewer, Tree)
    assert len(paths) == 2
    assert fewer.size + count == tree.size
    assert (
        sorted(node_values(fewer, ACCURACIES), reverse=True)
        == sorted(values, reverse=True)[: fewer.size]
    )
    chances = [
        match.chance**level
        for match, path in zip(text.draft.ngrams.find(text.tokens, 9), paths, strict=False)
        for level in range(1, len(path) + 1)
    ]
    assert min(chances) >= max(sorted(values)[:count])
    assert policy.next([begin(policy, [1, 2, 3], 4)]) == [(tree, [])]


def test_dynamic_tree_shares_its_budget() -> None:
    tree = DynamicTree(12, 3)
    policy = DynamicTreePolicy(tree, ngrams=True)
    [(fewer, [path])] = policy.next([begin(policy, ROUND, ROUND[0])])
    assert path
    assert fewer == replace(tree, budget=12 - len(path))
    assert len(path) <= 6


def test_paths_are_added_and_no_node_twice() -> None:
    tree = Tree.from_choices([[0], [1], [0, 0]])  # nodes 1 and 2 below the root, 3 below 1
    draft = Draft(torch.tensor([9, 4, 5, 6]), tree)
    known = add_paths(draft, [(4, 6)])
    assert known.tree == tree
    assert known.looked_up == 2
    more = add_paths(draft, [(4, 7, 8), (4, 7, 1)])
    assert more.tokens.tolist() == [9, 4, 5, 6, 7, 8, 1]
    assert more.tree.parents == (
        -1,
        0,
        0,
        1,
        1,
        4,
        4,
    )
    assert len({tuple(path) for path in more.tree.choices}) == 6  # every node has a path of its own
    alone = add_paths(Draft(torch.tensor([9]), Tree.root_only()), [(1, 2)])
    assert alone.tree == Tree.chain(2)
    assert alone.looked_up == 2


def test_adaptive_policy_drafts_as_many_matched_tokens_as_pay() -> None:
    sized = SizedTree(search(ACCURACIES, 4), 1.7)
    for costs, fewest, limit in ((CHEAP, 8, MAX_TOKENS), (DEAR, 0, 0)):
        policy = AdaptivePolicy([sized], costs)
        policy.next([begin(policy, [], 0)])
        [(_, count)] = policy.weigh_matches([0.95])
        assert fewest <= count <= limit
        assert policy.weigh_matches([0.01]) == [(policy.next([begin(policy, [], 0)])[0][0], 0)]
    larger = SizedTree(search(ACCURACIES, 9), 2.5)
    assert AdaptivePolicy([sized, larger], CHEAP).size == 9
    # A nearly sure match saves the drafter's own time.
    slow = StepTimes({1: 0.010, 32: 0.020}, {1: 0.010, 4: 0.030})
    assert AdaptivePolicy([sized], slow).weigh_matches([0.97])[0][0] == Tree.root_only()


@pytest.mark.parametrize(
    "chances", [[0.0, 0.9, 0.0, 0.5], [0.95] * 4, [0.3, 0.4, 0.0, 0.0], [0.0] * 4], ids=str
)
@pytest.mark.parametrize("costs", [CHEAP, FIFTH, DEAR], ids=["cheap", "fifth", "dear"])
@pytest.mark.parametrize("trees", [[], [SizedTree(TREE, 2.2)]], ids=["alone", "tree"])
def test_batch_drafts_what_pays_best_together(
    trees: list[SizedTree], costs: StepTimes, chances: list[float]
) -> None:
    """Compares with every width of the pass, in which each sequence drafts what gives it most."""
    policy = AdaptivePolicy(trees, costs)
    now = policy.next([begin(policy, [], 0) for _ in chances])[0][0]

    def tokens(chance: float, nodes: int, count: int) -> float:
        matched = sum(chance**level for level in range(1, count + 1))
        return 1 + matched + ((1 - chance) if count else 1) * (1.2 if nodes > 1 else 0)

    def rate(drafts: list[tuple[int, int]]) -> float:
        widest = max(nodes + count for nodes, count in drafts)
        depth = now.max_depth if any(nodes > 1 for nodes, _ in drafts) else 0
        gained = sum(tokens(chance, *draft) for chance, draft in zip(chances, drafts, strict=True))
        return gained / costs.step(widest, depth, len(chances))

    every = []
    for sizes in ({1}, {1, now.size}):
        for rows in range(max(sizes), now.size + MAX_TOKENS + 1):
            options = [
                [(n, min(rows - n, MAX_TOKENS) if chance else 0) for n in sizes]
                for chance in chances
            ]
            every.append(
                [
                    max(own, key=lambda d, c=chance: tokens(c, *d))
                    for chance, own in zip(chances, options, strict=True)
                ]
            )
    drafts = [(tree.size, count) for tree, count in policy.weigh_matches(chances)]
    assert all(chance or not count for chance, (_, count) in zip(chances, drafts, strict=True))
    assert rate(drafts) >= 0.96 * max(map(rate, every))
    assert rate(drafts) >= rate([(now.size, 0)] * len(chances))


def test_matches_of_one_sequence_do_not_hide_the_acceptance_of_another() -> None:
    policy = AdaptivePolicy([SizedTree(TREE, 2.2)], CHEAP)
    texts = [begin(policy, [], 0), begin(policy, [], 0)]
    for _ in range(60):
        nodes = policy.next(texts)[0][0].size
        repeats = Step([1] * 9, 9, tuple(range(9)), 0.001, 0.005, looked_up=8)
        policy.record(texts, [repeats, Step([1], nodes, (0,), 0.001, 0.005)])
    assert texts[1].draft.acceptance.ratio < 0.1
    assert texts[0].draft.acceptance.ratio == 1.0


def test_forks_share_priors_and_not_sequences() -> None:
    policy = AdaptivePolicy([SizedTree(TREE, 2.2)], CHEAP, ngrams=True)
    first, second = policy.fork(), policy.fork()
    texts = [(fork, begin(fork, [1, 2], 3), share) for fork, share in ((first, 0), (second, 1))]
    for _ in range(300):  # nothing is accepted in the first text, everything in the second
        for fork, text, share in texts:
            [(tree, _)] = fork.next([text])
            accepted = share * tree.max_depth
            path = tuple(range(accepted + 1))
            fork.record([text], [Step([1] * len(path), tree.size, path, verify_s=0.01)])
    assert first.size == 1
    assert second.size == TREE.size
    for _ in range(40):
        first.begin(Sampling()).ngrams.trust[4].update(16, 0)
    assert second.begin(Sampling()).ngrams.trust[4].ratio < PRIOR_BY_LENGTH[4]


def policies() -> dict[str, DraftPolicy]:
    return {
        "static": StaticTreePolicy(TREE, ACCURACIES, ngrams=True),
        "uncalibrated": StaticTreePolicy(TREE, ngrams=True),
        "dynamic": DynamicTreePolicy(DynamicTree(8, 3), ngrams=True),
        "adaptive": AdaptivePolicy([SizedTree(TREE, 2.0)], CHEAP, ngrams=True),
        "dear": AdaptivePolicy([SizedTree(TREE, 2.0)], DEAR, ngrams=True),
        "alone": AdaptivePolicy([], CHEAP, ngrams=True),
    }


def drafter_for(backbone: Backbone, kind: str) -> HeadDrafter | None:
    return None if kind == "alone" else drafter_of(backbone, "hydra-draft")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampling"),
    [(family, Sampling()) for family in FAMILIES]
    + [("llama", Sampling("exact", 0.8, seed=3)), ("llama", Sampling("exact", 1.3, 0.9, seed=5))],
    ids=[*FAMILIES, "exact", "nucleus"],
)
def test_answers_are_those_of_plain_decoding(family: str, sampling: Sampling) -> None:
    backbone = tiny_backbone(family, engine=FASTEST)
    # Mistral's text repeats itself late.
    count = 90 if family == "mistral" else 60
    rules: dict[str, Any] = {"max_new_tokens": count, "stop_ids": (), "sampling": sampling}
    expected = tokens_of(generate_plain(backbone, ROUND, **rules))
    for kind, policy in policies().items():
        steps = list(generate(backbone, drafter_for(backbone, kind), policy, ROUND, **rules))
        assert tokens_of(steps) == expected, kind
        assert any(step.looked_up for step in steps) or kind == "dear" or not sampling.greedy, kind
        assert kind not in ("static", "dynamic") or all(step.nodes <= 8 for step in steps)


@pytest.mark.quick("adaptive")
@pytest.mark.parametrize("kind", ["static", "dynamic", "adaptive", "alone"])
def test_batch_gives_each_sequence_what_it_gets_alone(kind: str) -> None:
    backbone = tiny_backbone(engine=FASTEST)
    prompts = [ROUND, PROMPT, ROUND[3:], [*PROMPT, *PROMPT, *PROMPT]]
    rules = {"max_new_tokens": 40, "stop_ids": ()}
    answers = generate_batch(
        backbone, drafter_for(backbone, kind), policies()[kind], prompts, batch_size=3, **rules
    )
    assert [tokens_of(steps) for steps in answers] == [
        tokens_of(generate_plain(backbone, prompt, **rules)) for prompt in prompts
    ]


def test_answer_stays_within_the_context() -> None:
    backbone, rules = tiny_backbone(engine=FASTEST), {"max_new_tokens": 50, "stop_ids": ()}
    prompt = (ROUND * 40)[: backbone.max_positions - 9]
    for kind, policy in policies().items():
        assert (
            len(tokens_of(generate(backbone, drafter_for(backbone, kind), policy, prompt, **rules)))
            == 9
        ), kind


@pytest.mark.quick("hydra-draft")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (None, "firp")])
def test_drafter_that_skipped_steps_drafts_what_it_would_have(kind: str) -> None:
    backbone = tiny_backbone(layers=6, engine="native")  # bits do not depend on a pass's rows

    def drafts(trees: list[Tree]) -> dict[int, list[int]]:
        """Returns the draft after so many tokens of one text, where each step takes the next of the trees."""
        drafter, by_length = drafter_of(backbone, kind), dict[int, list[int]]()
        inner = drafter.draft

        def keep(*given: Any) -> list[Draft]:
            (draft,) = inner(*given)
            by_length[given[2][0].end] = draft.tokens.tolist()
            return [draft]

        drafter.draft = keep
        decoder = decoder_of(backbone, drafter)
        # An adaptive policy keeps the states of plain steps while drafts may pay.
        decoder._keeps_states = lambda batch: True
        decoder.admit(Request(ROUND, max_new_tokens=60, stop_ids=()))
        for number in range(40):
            decoder.policy = policy_of(trees[number % len(trees)])
            decoder.step()
        return by_length

    always, rarely = (
        drafts([SPARSE.truncate(3)]),
        drafts([Tree.root_only(), Tree.root_only(), SPARSE.truncate(3)]),
    )
    common = always.keys() & rarely.keys()
    assert len(common) > 5
    assert len(always) > len(rarely)
    assert all(rarely[length] == always[length] for length in common)


@pytest.mark.quick("--tree=static:4")
@pytest.mark.parametrize("tree", ["--tree=static:4", "--tree=auto"])
def test_chat_says_that_lookup_has_no_effect_with_firp(tmp_path: Path, tree: str) -> None:
    model = save_model(tmp_path / "model", layers=4)
    run = save_run(tmp_path / "run", model, heads=3, calibrated=True)
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    save_drafter(drafter_of(backbone, "firp"), run.drafter_dir, provenance(backbone.identity))
    result = medusa(
        "chat",
        "--run",
        f"{run.path}/",
        tree,
        "--lookup",
        "--prompt",
        "w5 w9",
        "--max-new-tokens",
        "4",
    )
    assert "firp" in result.stderr
    assert "--lookup" in result.stderr
