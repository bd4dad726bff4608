"""The adaptive policy drafts more where drafts are accepted, nothing where they are not, and tries again."""

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace

import pytest
import torch

from medusa_cli.decode import AdaptivePolicy, Sampling, Step
from medusa_cli.decode.adaptive_policy import (
    MAX_TRIAL_COST,
    TRIAL_STEPS,
    Growing,
    convex,
)
from medusa_cli.decode.ngram import AcceptanceEstimate
from medusa_cli.decode.policy import Proposal
from medusa_cli.decode.sampling_options import sampling_kind
from medusa_cli.decode.sequence import DraftState
from medusa_cli.decode.step_costs import StepCosts
from medusa_cli.drafters.base import NewTokens
from medusa_cli.drafters.expansion import Frontier, draft_by_level
from medusa_cli.tree import Draft, DynamicTree, Tree
from medusa_cli.tree.search import SizedTree, StepTimes, budgets
from tests.helpers import PROMPT, generate, plain, tiny_backbone, tokens_of
from tests.test_drafters import drafter_of

ROOT, SMALL, LARGE = Tree.root_only(), Tree.chain(2), Tree.dense([3, 2, 2])
SECONDS = {ROOT.size: 0.010, SMALL.size: 0.012, LARGE.size: 0.0135}
GREEDY, HOT = Sampling(), Sampling("exact", 1.5)


def adaptive(*trees: SizedTree) -> AdaptivePolicy:
    """Returns a policy on a machine where rows cost little, by default for a fair drafter."""
    trees = trees or (SizedTree(LARGE, 1.9), SizedTree(SMALL, 1.7))
    return AdaptivePolicy(trees, StepTimes(SECONDS, {1: 0.0, 3: 0.0}))


def begin(policy: AdaptivePolicy, sampling: Sampling = GREEDY) -> SimpleNamespace:
    """Returns what a policy reads of a sequence that begins."""
    return SimpleNamespace(
        draft=policy.begin(sampling), tokens=[], root=0, sampler=SimpleNamespace(processors=None)
    )


def choose(policy: AdaptivePolicy, *sequences: SimpleNamespace) -> Tree:
    return policy.next(sequences or [begin(policy)])[0][0]


def record(
    policy: AdaptivePolicy, sequence: SimpleNamespace, tree: Tree, accepted: int, seconds: float
) -> None:
    path = tuple(range(accepted + 1))
    policy.record([sequence], [Step([1] * len(path), tree.size, path, verify_s=seconds)])


def steps(
    policy: AdaptivePolicy,
    ratio: float,
    count: int,
    sequence: SimpleNamespace | None = None,
    seconds: Callable[[Tree], float] = lambda tree: SECONDS[tree.size],
) -> list[int]:
    """Takes steps that accept this share of the tree's depth; returns the sizes that were drafted."""
    sequence, sizes = sequence or begin(policy), []
    for _ in range(count):
        tree = choose(policy, sequence)
        record(policy, sequence, tree, round(ratio * tree.max_depth), seconds(tree))
        sizes.append(tree.size)
    return sizes


def test_accepted_drafts_make_the_tree_larger() -> None:
    policy = adaptive()
    sizes = steps(policy, 1.0, 60)
    # Two of two accepted where 0.7 were expected: four tokens in 13.5 ms are more than three in 12.
    assert sizes[0] == SMALL.size
    assert set(sizes[20:]) - {ROOT.size} == {LARGE.size}
    assert sizes.count(ROOT.size) <= 2  # plain steps that check whether drafting still pays
    assert policy.acceptance > 1.5


def test_trials_wait_until_plain_steps_have_paid_for_them() -> None:
    policy = adaptive()
    sizes = steps(policy, 0.0, 4000)
    first = sizes.index(ROOT.size)
    assert sizes[0] == SMALL.size
    assert first <= 8
    assert policy.acceptance < 0.5
    drafted = [size for size in sizes[first:] if size > 1]
    # Both steps of the dearest trial accept nothing.
    dearest = TRIAL_STEPS * (SECONDS[SMALL.size] / SECONDS[ROOT.size] - 1)
    paid = MAX_TRIAL_COST * sizes.count(ROOT.size) + 2 * dearest
    assert set(drafted) == {SMALL.size}
    assert len(drafted) / TRIAL_STEPS * dearest <= paid
    assert len(drafted) > 20  # trials go on for ever


def speedup(
    policy: AdaptivePolicy,
    chances: Sequence[float],
    sampling: Sampling = GREEDY,
    texts: int = 1,
    length: int = 96,
) -> float:
    """Returns tokens a second against plain decoding: texts of stretches of `length` tokens, each with its chance."""
    generator, costs = torch.Generator().manual_seed(1), policy.costs.measured
    seconds, count = 0.0, 0
    for _ in range(texts):
        policy = policy.fork()
        text = begin(policy, sampling)
        for chance in chances:
            tokens = 0
            while tokens < length:
                tree = choose(policy, text)
                accepted = int(
                    (torch.rand(tree.max_depth, generator=generator) < chance)
                    .long()
                    .cumprod(0)
                    .sum()
                )
                took = costs(tree.size, tree.max_depth)
                record(policy, text, tree, accepted, took)
                seconds, tokens = seconds + took, tokens + 1 + accepted
            count += tokens
    return count * costs(1, 0) / seconds


@pytest.mark.slow
def test_policy_finds_its_way_back_after_a_stretch_that_fails() -> None:
    """Simulates texts of 400 tokens that no draft fits, then 400 that drafts fit, at fair accuracies and costs."""
    accuracies, costs = (
        [[0.5], [0.44], [0.41], [0.40]],
        StepTimes({1: 1.0, 2: 1.1, 5: 1.4, 64: 6.0}, {1: 0.1, 4: 0.3}),
    )
    policy = AdaptivePolicy(budgets(accuracies, costs), costs)
    assert speedup(policy, [0.0, 0.7], texts=20, length=400) >= 1.12
    assert speedup(policy, [0.0] * 10, texts=3, length=400) >= 0.99


def serve(
    policy: AdaptivePolicy, chances: Sequence[float], length: int, slots: int = 1
) -> tuple[float, float]:
    """Decodes answers of so many tokens, each as soon as a slot is free.

    chances: that a draft token is right, for each answer. Returns the speedup and the share of drafted steps.
    """
    generator, waiting, running = (
        torch.Generator().manual_seed(1),
        list(chances),
        list[SimpleNamespace](),
    )
    seconds, tokens, sizes = 0.0, 0, []
    while len(running) < slots:
        running.append(
            SimpleNamespace(
                text=begin(policy), chance=waiting.pop(0), left=length * (1 + len(running))
            )
        )
    while waiting:
        tree = choose(policy, *(answer.text for answer in running))
        took = policy.costs.measured(tree.size, tree.max_depth, slots)
        taken = []
        for answer in running:
            right = torch.rand(tree.max_depth, generator=generator) < answer.chance
            accepted = min(int(right.long().cumprod(0).sum()), answer.left - 1)
            answer.left -= 1 + accepted
            tokens += 1 + accepted
            path = tuple(range(1 + accepted))
            taken.append(Step([1] * len(path), tree.size, path, verify_s=took / slots))
        policy.record([answer.text for answer in running], taken)
        seconds += took
        sizes.append(tree.size)
        for i, answer in enumerate(running):
            if not answer.left and waiting:
                running[i] = SimpleNamespace(text=begin(policy), chance=waiting.pop(0), left=length)
    plain_rate = slots / policy.costs.measured(1, 0, slots)
    return tokens / seconds / plain_rate, sum(size > 1 for size in sizes) / len(sizes)


@pytest.mark.quick("12-1", "2-1", "30-8", "6-1", "8-8")
@pytest.mark.parametrize(("length", "slots"), [(2, 1), (6, 1), (12, 1), (8, 8), (30, 8), (96, 8)])
def test_short_and_frequent_answers_find_their_way_back(length: int, slots: int) -> None:
    """Answers may have fewer tokens than there are plain steps between trials; with 8 slots one begins every few."""
    policy = adaptive()
    failed, _ = serve(policy, [0.0] * 60, length, slots)
    _, drafted = serve(policy, [1.0] * 200, length, slots)
    assert failed >= 0.97
    assert drafted > 0.6


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_drafter_that_does_not_pay_costs_at_most_three_percent(
    chance: float, sampling: Sampling
) -> None:
    assert speedup(adaptive(), [chance], sampling, texts=8) >= 0.97
    assert speedup(adaptive(), [0.7], sampling, texts=8) > 1.3  # and one that does is not given up


def test_easy_and_hard_texts_in_turn_do_not_disturb_each_other() -> None:
    policy = adaptive()
    pairs = [(speedup(policy, [0.7]), speedup(policy, [0.0])) for _ in range(8)]
    assert min(easy for easy, _ in pairs) > 1.2
    assert min(hard for _, hard in pairs) > 0.96


def test_sequence_begins_with_the_estimate_of_its_kind_of_sampling() -> None:
    policy = adaptive()
    steps(policy, 0.0, 300, begin(policy, HOT))
    steps(policy, 1.0, 60, begin(policy))
    later = policy.fork()
    assert choose(later, begin(later, HOT)) == ROOT
    assert choose(later, begin(later)).size > 1
    assert choose(later, begin(later, Sampling("exact", 0.3))).size > 1  # nothing is known of it
    for mode in ("exact", "typical"):
        assert len({sampling_kind(Sampling(mode, 10.0**power)) for power in (3, 103, 308)}) == 1


def test_mean_acceptance_of_a_batch_decides() -> None:
    policy = adaptive()
    for sampling, ratio in ((GREEDY, 0.4), (HOT, 0.0)):
        policy.begin(sampling).acceptance.update(1e6, 1e6 * ratio)
    assert choose(policy, begin(policy, HOT)) == ROOT
    choose(policy, begin(policy, HOT), begin(policy))
    assert policy.acceptance == pytest.approx(0.2, abs=1e-3)
    assert choose(policy, begin(policy)).size > 1


def test_slow_trees_are_left() -> None:
    policy = adaptive()
    text = begin(policy)
    steps(policy, 0.35, 10, text, lambda tree: 0.010 if tree.size == 1 else 0.060)
    assert choose(policy, text) == ROOT


def test_quicker_trees_make_plain_steps_quicker_too() -> None:
    policy = adaptive(SizedTree(SMALL, 1.7))
    text = begin(policy)
    text.draft = DraftState(AcceptanceEstimate(0.28, 50.0, 0.98))
    steps(policy, 0.0, 3, text, lambda tree: 0.9 * SECONDS[tree.size])
    assert choose(policy, text) == ROOT


def test_slow_plain_steps_of_a_busy_minute_are_forgotten() -> None:
    policy = adaptive()
    for _ in range(3):
        steps(policy, 0.0, 40)
        steps(policy, 0.0, 30, seconds=lambda tree: 1.3 * SECONDS[tree.size])
    sizes = steps(policy, 0.0, 200, begin(policy, Sampling("exact", 1.0)))
    assert sizes.count(ROOT.size) > 170


def test_single_outlier_changes_nothing() -> None:
    policy = adaptive()
    text = begin(policy)
    steps(policy, 0.5, 20, text)
    before = choose(policy, text)
    steps(policy, 0.5, 1, text, lambda tree: 30.0)
    steps(policy, 0.5, 20, text)
    assert before.size > 1
    assert choose(policy, text) is before


@pytest.mark.parametrize("row", [0.00005, 0.0005, 0.003], ids=["free", "cheap", "dear"])
@pytest.mark.parametrize("rows", [(3, 7), (3, 7, 16)], ids=["few", "many"])
def test_noise_of_small_drafts_does_not_change_what_large_drafts_cost(
    row: float, rows: tuple[int, ...]
) -> None:
    """Steps in which some matched tokens are drafted hardly take longer than plain steps."""
    chance = Random(0)
    true = {nodes: 0.015 + row * (nodes - 1) for nodes in (1, *rows, 32)}
    costs = StepCosts(StepTimes(true, {1: 0.0})).of_batch(1)
    for _ in range(2000):
        nodes = chance.choice([1, 1, *rows])
        costs.record(nodes, 0, 0, true[nodes] * max(0.5, chance.gauss(1.05, 0.1)))
        assert 0.6 < costs.seconds(32, 0) / true[32] < 1.9


def test_tree_truncated_by_the_context_teaches_nothing() -> None:
    policy = adaptive()
    before, text = policy.acceptance, begin(policy)
    policy.record([text], [Step([1], 2, (0,), verify_s=9.0)])
    assert policy.acceptance == before
    assert choose(policy, text) is SMALL


class Alternating(AdaptivePolicy):
    """Drafts trees of every size in turn."""

    sizes = (ROOT, SMALL, SMALL, ROOT, ROOT, LARGE, LARGE)
    turn = 0

    def __init__(self) -> None:
        super().__init__(
            [SizedTree(LARGE, 1.9), SizedTree(SMALL, 1.7)], StepTimes(SECONDS, {1: 0.0, 3: 0.0})
        )

    def propose(self, sequences, matches) -> list[Proposal]:
        self.turn += 1
        return [(self.sizes[self.turn % len(self.sizes)], []) for _ in sequences]


def test_extra_rows_fit_the_next_tree() -> None:
    """FIRP's rows join the pass before the draft: it follows a policy one step later."""
    backbone = tiny_backbone(layers=4)
    drafter, rules = drafter_of(backbone, "firp"), {"max_new_tokens": 60, "stop_ids": ()}
    answer = list(generate(backbone, drafter, Alternating(), PROMPT, **rules))
    assert tokens_of(answer) == plain(backbone, 60)
    assert {step.nodes for step in answer[1:]} >= {ROOT.size, SMALL.size, LARGE.size}


LEVELS = StepTimes({1: 1.0, 4: 1.12, 8: 1.4, 12: 1.9}, {1: 0.12, 2: 0.2, 3: 0.28, 4: 0.36})
CHAINS = [SizedTree(Tree.chain(n), sum(0.5**k for k in range(n + 1))) for n in range(1, 5)]


def growing() -> AdaptivePolicy:
    return AdaptivePolicy(CHAINS, LEVELS, growing=Growing(DynamicTree(12, 4, width=2), (0.5,) * 4))


def drafted(tree: Tree | DynamicTree, confidence: float) -> Draft:
    """Drafts with a drafter that is always as sure of its best guess."""

    def guess(
        head: int, width: int, temperature: float | None, level: Frontier
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chances = torch.tensor([confidence, 0.5 * min(confidence, 1 - confidence)]).log()
        count = len(level.tokens)
        return chances.repeat(count, 1), torch.tensor([1, 2]).repeat(count, 1)

    return draft_by_level(tree, [NewTokens(torch.zeros(1).long(), torch.zeros(1, 1), 0, 0)], guess)[
        0
    ]


def decode(
    policy: AdaptivePolicy,
    confidences: Callable[[int], float],
    count: int,
    right: Callable[[float], float] = lambda confidence: confidence,
) -> tuple[float, list[Step]]:
    """Takes steps whose best guesses are right with a probability that follows from the drafter's confidence.

    Returns the speedup over plain decoding and the steps.
    """
    generator = torch.Generator().manual_seed(1)
    text = begin(policy)
    seconds = 0.0
    taken = []
    for number in range(count):
        confidence = confidences(number)
        tree = choose(policy, text)
        draft = drafted(tree, confidence) if tree.max_depth else Draft(torch.zeros(1), ROOT)
        chain = [
            node for node in range(1, draft.tree.size) if not any(draft.tree.choices[node - 1])
        ]
        hits = torch.rand(len(chain), generator=generator) < right(confidence)
        path = (0, *chain[: int(hits.long().cumprod(0).sum())])
        levels = draft.growth.levels if draft.growth else tree.max_depth
        took = LEVELS.step(draft.tree.size, levels)
        step = Step([1] * len(path), draft.tree.size, path, verify_s=took, growth=draft.growth)
        policy.record([text], [step])
        seconds += took
        taken.append(step)
    return sum(len(step.path) for step in taken) / seconds, taken


def test_trees_grow_where_the_drafter_is_sure() -> None:
    def mixed(number: int) -> float:
        return 0.95 if number % 2 else 0.1

    speedup, taken = decode(growing(), mixed, 400)
    static, _ = decode(AdaptivePolicy(CHAINS, LEVELS), mixed, 400)
    sure = [step.growth.levels for step in taken[1::2] if step.growth]
    unsure = [step for step in taken[::2] if step.growth]
    assert min(sure) == 4
    assert {step.growth.levels for step in unsure if step.growth} == {1}
    assert max(step.nodes for step in unsure) <= 3
    assert speedup > 1.1 * static > 1.1


def test_confidences_that_are_wrong_end_drafting() -> None:
    policy = growing()
    speedup, taken = decode(policy, lambda number: 0.6, 1000, right=lambda confidence: 0.0)
    late = [step for step in taken[50:] if step.growth]
    assert speedup > 0.96
    assert 0 < len(late) < 60
    assert {step.growth.levels for step in late if step.growth} == {1}  # trials are cheap
    speedup, taken = decode(policy, lambda number: 0.9, 400)  # a text that drafts fit
    assert speedup > 1.5
    assert any(step.growth for step in taken[-2:])


def test_a_single_miss_of_a_sure_drafter_does_not_end_drafting() -> None:
    policy = growing()
    _, taken = decode(policy, lambda number: 0.95, 40, right=lambda confidence: 0.0)
    drafted = [number for number, step in enumerate(taken) if step.growth]
    assert drafted[:2] == [0, 1]
    assert len(drafted) < 24


def test_prices_rise_ever_faster_whatever_the_noise() -> None:
    assert convex([1.0, 2.0, 5.0, 4.0, 4.0, 7.0, 12.0]) == [1.0, 1.75, 2.5, 3.25, 4.0, 7.0, 12.0]
    assert convex([3.0, 2.0, 2.5, 9.0])[:3] == [3.0, 3.0, 3.5]
    assert convex([1.0]) == [1.0]


def test_growing_trees_stay_within_a_limit_of_nodes() -> None:
    limit = Growing(DynamicTree(3, 4, width=2), (0.9,) * 4)
    policy = AdaptivePolicy(CHAINS, LEVELS, growing=limit)
    assert policy.size == 3
    assert drafted(choose(policy), 0.95).tree.size == 3
