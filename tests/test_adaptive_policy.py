"""The adaptive policy drafts more where drafts are accepted, nothing where they are not, and tries again."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from medusa_cli.decode import AdaptivePolicy, Sampling, Step
from medusa_cli.decode.estimates import AcceptancePriors, SequenceAcceptance, sampling_kind
from medusa_cli.decode.policy import MAX_RETRY_STEPS, RETRY_STEPS, TRIAL_STEPS, DraftState, SizedTree
from medusa_cli.tree import Tree
from medusa_cli.tree.search import Costs
from tests.helpers import FAMILIES, PROMPT, Oracle, generate, generate_batch, plain, tiny_backbone
from tests.test_hydra import hydra

ROOT, FEW, MANY = Tree.root_only(), Tree.chain(2), Tree.dense([3, 2, 2])


def sizes() -> list[SizedTree]:
    """A machine on which rows cost a little, and a drafter thought fair."""
    return [SizedTree(MANY, 1.9), SizedTree(FEW, 1.7)]


SECONDS = {ROOT.size: 0.010, FEW.size: 0.012, MANY.size: 0.0135}
COSTS = Costs(SECONDS, {1: 0.0, 3: 0.0})


GREEDY, HOT = Sampling(), Sampling("exact", 1.5)


def begin(policy: AdaptivePolicy, sampling: Sampling = GREEDY) -> SimpleNamespace:
    """Returns what a policy reads of a sequence that begins."""
    return SimpleNamespace(draft=policy.begin(sampling), tokens=[], root=0)


def choose(policy: AdaptivePolicy, *texts: SimpleNamespace) -> Tree:
    return policy.choose([text.draft.acceptance for text in texts])


def step(
    pace: AdaptivePolicy, text: SimpleNamespace, share: float, seconds: Callable[[Tree], float] | None = None
) -> Tree:
    """One step of the tree that the pace asks for, of whose depth so much is accepted."""
    tree = choose(pace, text)
    took = SECONDS[tree.size] if seconds is None else seconds(tree)
    accepted = round(share * tree.max_depth)
    path = tuple(range(accepted + 1))
    pace.record([text], [Step([1] * (accepted + 1), tree.size - 1, accepted, 0.0, took, False, path, tree.size)])
    return tree


def chosen(pace: AdaptivePolicy, share: float, count: int, text: SimpleNamespace | None = None) -> list[int]:
    text = text or begin(pace, GREEDY)
    return [step(pace, text, share).size for _ in range(count)]


def test_before_anything_is_known_what_is_expected_decides() -> None:
    assert choose(AdaptivePolicy(sizes(), COSTS)) is FEW  # 1.7 tokens in 12 ms, 1.9 in 13.5, 1 in 10
    dear = Costs({1: 0.010, 3: 0.030}, {1: 0.0})
    assert choose(AdaptivePolicy([SizedTree(FEW, 1.7)], dear)) == ROOT
    assert AdaptivePolicy(sizes(), COSTS).max_depth == 3


def test_drafts_that_always_come_true_make_it_draft_the_most() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    found = chosen(pace, 1.0, 60)
    # Two of two accepted where 0.7 were expected: four tokens in 13.5 ms are more than three in 12.
    assert found[0] == FEW.size and found[-1] == MANY.size and pace.acceptance > 1.5
    assert set(found[20:]) == {MANY.size} and ROOT.size not in found


def test_drafts_that_never_come_true_make_it_draft_nothing() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    found = chosen(pace, 0.0, RETRY_STEPS)
    first = found.index(ROOT.size)
    assert found[0] == FEW.size and set(found[first:]) == {ROOT.size} and pace.acceptance < 0.5


def test_retry_interval_doubles() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    found = chosen(pace, 0.0, 4000)
    assert found.index(ROOT.size) <= 8  # steps that were lost before it gave up
    tries, rests, run = 0, [], 0
    for size in found[found.index(ROOT.size) :]:
        if size == ROOT.size:
            run += 1
        elif run:
            rests.append(run)
            run = 0
            tries += 1
    assert (
        rests[:4] == [RETRY_STEPS, 2 * RETRY_STEPS, 4 * RETRY_STEPS, 8 * RETRY_STEPS] and max(rests) == MAX_RETRY_STEPS
    )
    drafted = [size for size in found[found.index(ROOT.size) :] if size > 1]
    assert set(drafted) == {FEW.size} and len(drafted) <= TRIAL_STEPS * (tries + 1)
    assert len(drafted) < 0.01 * len(found)  # hardly slower than plain


def test_a_text_that_turns_easy_is_drafted_for_again_and_one_that_turns_hard_is_not() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    text = begin(pace, GREEDY)
    hard = chosen(pace, 0.0, 40, text)
    easy = chosen(pace, 1.0, 4 * RETRY_STEPS + 100, text)
    again = chosen(pace, 0.0, 180, text)
    assert hard.count(ROOT.size) > 25
    assert easy[-1] == MANY.size and easy.count(ROOT.size) <= 4 * RETRY_STEPS
    assert again[-20:].count(ROOT.size) > 15
    # What came before is forgotten, if slowly: half of it in 35 steps.
    assert again.index(ROOT.size) < 150


def lost(pace: AdaptivePolicy, share: float, sampling: Sampling, texts: int, length: int = 96) -> float:
    """Tokens a second of texts whose drafts are accepted by chance, against plain decoding."""
    chance, seconds, count = torch.Generator().manual_seed(1), 0.0, 0
    for _ in range(texts):
        text, tokens = begin(pace, sampling), 0
        while tokens < length:
            tree = choose(pace, text)
            hits = torch.rand(tree.max_depth, generator=chance) < share
            accepted = int(hits.long().cumprod(0).sum())
            seconds, tokens = seconds + SECONDS[tree.size], tokens + 1 + accepted
            path = tuple(range(accepted + 1))
            took = SECONDS[tree.size]
            pace.record([text], [Step([1], tree.size - 1, accepted, 0.0, took, False, path, tree.size)])
        count += tokens
    return count * SECONDS[ROOT.size] / seconds


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_drafter_that_does_not_pay_costs_at_most_three_in_a_hundred(share: float, sampling: Sampling) -> None:
    assert lost(AdaptivePolicy(sizes(), COSTS), share, sampling, texts=8) >= 0.97
    assert lost(AdaptivePolicy(sizes(), COSTS), 0.7, sampling, texts=8) > 1.3  # and one that does is not given up


def test_texts_of_two_languages_in_turn_get_what_each_alone_would() -> None:
    """English drafts come true, Chinese ones never do: the one is drafted for, the other costs a few steps."""
    pace = AdaptivePolicy(sizes(), COSTS)
    english, chinese = [], []
    for _ in range(8):
        english.append(lost(pace, 0.7, GREEDY, 1))
        chinese.append(lost(pace, 0.0, GREEDY, 1))
    assert min(english) > 1.2 and min(chinese) > 0.96


def test_a_sequence_begins_with_the_estimate_of_its_kind_of_sampling() -> None:
    policy = AdaptivePolicy(sizes(), COSTS)
    chosen(policy, 0.0, 300, begin(policy, HOT))
    chosen(policy, 1.0, 60, begin(policy, GREEDY))
    later = policy.fork()
    assert choose(later, begin(later, HOT)) == ROOT and choose(later, begin(later, GREEDY)).size > 1
    assert choose(later, begin(later, Sampling("exact", 0.3))).size > 1  # of which nothing is known


@pytest.mark.parametrize("mode", ["exact", "typical"])
def test_any_temperature_is_of_a_kind(mode: str) -> None:
    assert len({sampling_kind(Sampling(mode, 10.0**power)) for power in (3, 103, 308)}) == 1


def test_the_mean_of_a_batch_decides() -> None:
    priors = AcceptancePriors()
    for sampling, ratio in ((GREEDY, 0.4), (HOT, 0.0)):
        text = priors.begin(sampling)
        priors.update(text, 1e6, 1e6 * ratio)
    pace = AdaptivePolicy(sizes(), COSTS, priors)
    assert choose(pace, begin(pace, HOT)) == ROOT
    choose(pace, begin(pace, HOT), begin(pace, GREEDY))
    assert pace.acceptance == pytest.approx(0.2, abs=1e-3)
    assert choose(pace, begin(pace, GREEDY)).size > 1


def test_seconds_that_turn_out_otherwise_move_it() -> None:
    """The trees cost far more here than was measured: plain decoding is what pays."""
    pace = AdaptivePolicy(sizes(), COSTS)
    text = begin(pace, GREEDY)
    for _ in range(10):
        step(pace, text, 0.35, lambda tree: 0.010 if tree.size == 1 else 0.060)
    assert choose(pace, text) == ROOT


def test_a_machine_that_turns_out_quicker_is_quicker_for_plain_steps_too() -> None:
    """Drafts that just pay by the times measured do not, where all steps are quicker than those."""
    pace, text = AdaptivePolicy([SizedTree(FEW, 1.7)], COSTS), begin(AdaptivePolicy([], COSTS))
    begin(pace)
    text.draft = DraftState(SequenceAcceptance(50.0, 14.0, "greedy"))
    for _ in range(3):
        step(pace, text, 0.0, lambda tree: 0.9 * SECONDS[tree.size])
    assert choose(pace, text) == ROOT


def test_plain_steps_that_a_busy_machine_once_made_slow_are_not_held_against_them_for_long() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    for _ in range(3):  # plain steps are seen while something else runs
        chosen(pace, 0.0, 40, begin(pace, GREEDY))
        mine = begin(pace, GREEDY)
        for _ in range(30):
            step(pace, mine, 0.0, lambda tree: 1.3 * SECONDS[tree.size])
    mine = begin(pace, Sampling("exact", 1.0))
    found = [step(pace, mine, 0.0, lambda tree: SECONDS[tree.size]).size for _ in range(200)]
    assert found.count(ROOT.size) > 170 and set(found[-20:]) == {ROOT.size}


def test_one_step_that_was_held_up_moves_nothing() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    text = begin(pace, GREEDY)
    for _ in range(20):
        step(pace, text, 0.5)
    before = choose(pace, text)
    assert before.size > 1
    step(pace, text, 0.5, lambda tree: 30.0)
    for _ in range(20):
        step(pace, text, 0.5)
    assert choose(pace, text) is before


def test_a_tree_cut_by_the_contexts_end_teaches_nothing() -> None:
    pace = AdaptivePolicy(sizes(), COSTS)
    before, text = pace.acceptance, begin(pace, GREEDY)
    pace.record([text], [Step([1], 1, 0, 0.0, 9.0, False, (0,), 2)])
    assert pace.acceptance == before and choose(pace, text) is FEW


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_adaptive_decoding_is_lossless(family: str, right: float) -> None:
    backbone = tiny_backbone(family)
    expected = plain(backbone)
    pace = AdaptivePolicy(sizes(), COSTS)
    steps = list(generate(backbone, Oracle(expected, right), pace, PROMPT, max_new_tokens=90, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == expected
    assert {s.nodes for s in steps[1:-8]} <= {ROOT.size, FEW.size, MANY.size}


@pytest.mark.parametrize("prefix", [0, 1])
def test_a_drafter_that_was_not_asked_for_a_while_finds_all_that_came(prefix: int, monkeypatch) -> None:
    """Trees of every size in turn, the root alone among them, drafted for one sequence and for many."""
    backbone = tiny_backbone("qwen3")
    heads = hydra(backbone, "own", prefix=prefix)

    class Turning(AdaptivePolicy):
        turn = 0

        def choose(self, acceptances) -> Tree:
            self.turn += 1
            return (ROOT, FEW, ROOT, ROOT, MANY)[self.turn % 5]

    seen: list[tuple[int, int]] = []
    inner = heads.draft

    def draft(backbone, sequences, pending, tree):
        seen.extend((one.start, len(one.tokens)) for one in pending)
        for one in pending:
            assert one.hidden.shape == (len(one.tokens), backbone.hidden_size)
        return inner(backbone, sequences, pending, tree)

    monkeypatch.setattr(type(heads), "draft", lambda own, *given: draft(*given))
    steps = list(generate(backbone, heads, Turning(sizes(), COSTS), PROMPT, max_new_tokens=60, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == plain(backbone, 60)
    # Each time it is told of every position since the last, and of none twice.
    at = len(PROMPT) - 1
    for start, count in seen:
        assert start == at
        at += count
    assert any(count > 2 for _, count in seen[1:])
    prompts = [PROMPT, [8], PROMPT[::-1]]
    answers: list[list[int]] = [[] for _ in prompts]
    rules = {"batch_size": 2, "max_new_tokens": 40, "stop_ids": ()}
    for number, one in generate_batch(backbone, heads, Turning(sizes(), COSTS), prompts, **rules):
        answers[number] += one.tokens
    for prompt, found in zip(prompts, answers, strict=True):
        alone = generate(backbone, None, None, prompt, max_new_tokens=40, stop_ids=())
        assert found == [t for s in alone for t in s.tokens]


def test_states_that_ride_in_the_pass_are_there_when_the_pace_asks_for_them() -> None:
    """FIRP's pseudo rows join the pass before the draft: their depth must be that of the next tree."""
    from tests.test_firp import backbone_of, firp

    backbone = backbone_of()
    drafter = firp(backbone)

    class Turning(AdaptivePolicy):
        turn = 0

        def choose(self, acceptances) -> Tree:
            self.turn += 1
            return (ROOT, FEW, MANY, ROOT, MANY, FEW)[self.turn % 6]

    torch.manual_seed(0)
    steps = list(generate(backbone, drafter, Turning(sizes(), COSTS), PROMPT, max_new_tokens=60, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == plain(backbone, 60)
    assert {s.nodes for s in steps[1:]} >= {ROOT.size, FEW.size, MANY.size}
