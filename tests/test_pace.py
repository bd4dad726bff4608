"""The pace of drafting: it goes up where drafts come true, down to none where they do not, and looks again."""

from collections.abc import Callable

import pytest
import torch

from medusa_cli.decoding import Pace, Sampling, Step, generate, generate_batch
from medusa_cli.decoding.luck import MOVED, Fortune, Fortunes, kind_of
from medusa_cli.decoding.pace import MOST_PATIENCE, PATIENCE, TRY, Size
from medusa_cli.tree import Tree
from medusa_cli.tree.budget import Costs
from tests.test_generate import PROMPT, Oracle, plain
from tests.test_hydra import hydra
from tests.tiny import FAMILIES, tiny_backbone

ROOT, FEW, MANY = Tree.root_only(), Tree.chain(2), Tree.dense([3, 2, 2])


def sizes() -> list[Size]:
    """A machine on which rows cost a little, and a drafter thought fair."""
    return [Size(MANY, 1.9), Size(FEW, 1.7)]


SECONDS = {ROOT.size: 0.010, FEW.size: 0.012, MANY.size: 0.0135}
COSTS = Costs(SECONDS, {1: 0.0, 3: 0.0})


GREEDY, HOT = Sampling(), Sampling("exact", 1.5)


def step(pace: Pace, text: Fortune, share: float, seconds: Callable[[Tree], float] | None = None) -> Tree:
    """One step of the tree that the pace asks for, of whose depth so much is accepted."""
    tree = pace.choose([text])
    took = SECONDS[tree.size] if seconds is None else seconds(tree)
    accepted = round(share * tree.max_depth)
    path = tuple(range(accepted + 1))
    pace.record([Step([1] * (accepted + 1), tree.size - 1, accepted, 0.0, took, False, path, tree.size)], [text])
    return tree


def chosen(pace: Pace, share: float, count: int, text: Fortune | None = None) -> list[int]:
    text = text or pace.begin(GREEDY)
    return [step(pace, text, share).size for _ in range(count)]


def test_before_anything_is_known_what_is_expected_decides() -> None:
    assert Pace(sizes(), COSTS).choose([]) is FEW  # 1.7 tokens in 12 ms, 1.9 in 13.5, 1 in 10
    dear = Costs({1: 0.010, 3: 0.030}, {1: 0.0})
    assert Pace([Size(FEW, 1.7)], dear).choose([]) == ROOT
    assert Pace(sizes(), COSTS).max_depth == 3


def test_drafts_that_always_come_true_make_it_draft_the_most() -> None:
    pace = Pace(sizes(), COSTS)
    found = chosen(pace, 1.0, 60)
    # Two of two accepted where 0.7 were expected: four tokens in 13.5 ms are more than three in 12.
    assert found[0] == FEW.size and found[-1] == MANY.size and pace.luck > 1.5
    assert set(found[20:]) == {MANY.size} and ROOT.size not in found


def test_drafts_that_never_come_true_make_it_draft_nothing() -> None:
    pace = Pace(sizes(), COSTS)
    found = chosen(pace, 0.0, PATIENCE)
    first = found.index(ROOT.size)
    assert found[0] == FEW.size and set(found[first:]) == {ROOT.size} and pace.luck < 0.5


def test_it_tries_again_and_each_try_in_vain_is_longer_in_coming() -> None:
    pace = Pace(sizes(), COSTS)
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
    assert rests[:4] == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE] and max(rests) == MOST_PATIENCE
    drafted = [size for size in found[found.index(ROOT.size) :] if size > 1]
    assert set(drafted) == {FEW.size} and len(drafted) <= TRY * (tries + 1)
    assert len(drafted) < 0.01 * len(found)  # hardly slower than plain


def test_a_text_that_turns_easy_is_drafted_for_again_and_one_that_turns_hard_is_not() -> None:
    pace = Pace(sizes(), COSTS)
    text = pace.begin(GREEDY)
    hard = chosen(pace, 0.0, 40, text)
    easy = chosen(pace, 1.0, 4 * PATIENCE + 100, text)
    again = chosen(pace, 0.0, 180, text)
    assert hard.count(ROOT.size) > 25
    assert easy[-1] == MANY.size and easy.count(ROOT.size) <= 4 * PATIENCE
    assert again[-20:].count(ROOT.size) > 15
    # What came before is forgotten, if slowly: half of it in 35 steps.
    assert again.index(ROOT.size) < 150


def lost(pace: Pace, share: float, sampling: Sampling, texts: int, length: int = 96) -> float:
    """Tokens a second of texts whose drafts are accepted by chance, against plain decoding."""
    chance, seconds, count = torch.Generator().manual_seed(1), 0.0, 0
    for _ in range(texts):
        text, tokens = pace.begin(sampling), 0
        while tokens < length:
            tree = pace.choose([text])
            hits = torch.rand(tree.max_depth, generator=chance) < share
            accepted = int(hits.long().cumprod(0).sum())
            seconds, tokens = seconds + SECONDS[tree.size], tokens + 1 + accepted
            path = tuple(range(accepted + 1))
            took = SECONDS[tree.size]
            pace.record([Step([1], tree.size - 1, accepted, 0.0, took, False, path, tree.size)], [text])
        count += tokens
    return count * SECONDS[ROOT.size] / seconds


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_a_drafter_that_does_not_pay_costs_at_most_three_in_a_hundred(share: float, sampling: Sampling) -> None:
    assert lost(Pace(sizes(), COSTS), share, sampling, texts=8) >= 0.97
    assert lost(Pace(sizes(), COSTS), 0.7, sampling, texts=8) > 1.3  # and one that does is not given up


def test_texts_of_two_languages_in_turn_get_what_each_alone_would() -> None:
    """English drafts come true, Chinese ones never do: the one is drafted for, the other costs a few steps."""
    pace = Pace(sizes(), COSTS)
    english, chinese = [], []
    for _ in range(8):
        english.append(lost(pace, 0.7, GREEDY, 1))
        chinese.append(lost(pace, 0.0, GREEDY, 1))
    assert min(english) > 1.2 and min(chinese) > 0.96


def test_what_is_known_of_a_kind_of_sampling_is_told_and_begun_with() -> None:
    told: list[dict[str, float]] = []
    pace = Pace(sizes(), COSTS, Fortunes(on_moved=told.append))
    chosen(pace, 0.0, 300, pace.begin(HOT))
    pace.end()
    chosen(pace, 1.0, 60, pace.begin(GREEDY))
    pace.end()
    pace.end()  # nothing new
    assert len(told) == 2 and told[1]["exact 1.5"] < 0.2 and told[1]["greedy"] > 1 + MOVED
    later = Pace(sizes(), COSTS, Fortunes(told[1]))
    assert later.choose([later.begin(HOT)]) == ROOT and later.choose([later.begin(GREEDY)]).size > 1
    assert later.choose([later.begin(Sampling("exact", 0.3))]).size > 1  # of which nothing is known


@pytest.mark.parametrize("mode", ["exact", "typical"])
def test_any_temperature_is_of_a_kind(mode: str) -> None:
    assert len({kind_of(Sampling(mode, 10.0**power)) for power in (3, 103, 308)}) == 1


def test_side_by_side_the_mean_of_the_texts_decides() -> None:
    pace = Pace(sizes(), COSTS, Fortunes({"greedy": 0.4, "exact 1.5": 0.0}))
    assert pace.choose([pace.begin(HOT)]) == ROOT
    pace.choose([pace.begin(HOT), pace.begin(GREEDY)])
    assert pace.luck == pytest.approx(0.2)
    assert pace.choose([pace.begin(GREEDY)]).size > 1


def test_seconds_that_turn_out_otherwise_move_it() -> None:
    """The trees cost far more here than was measured: plain decoding is what pays."""
    pace = Pace(sizes(), COSTS)
    text = pace.begin(GREEDY)
    for _ in range(10):
        step(pace, text, 0.35, lambda tree: 0.010 if tree.size == 1 else 0.060)
    assert pace.choose([text]) == ROOT


def test_a_machine_that_turns_out_quicker_is_quicker_for_plain_steps_too() -> None:
    """Drafts that just pay by the times measured do not, where all steps are quicker than those."""
    pace, text = Pace([Size(FEW, 1.7)], COSTS), Fortune(50.0, 14.0, "greedy")
    pace._fortunes.begin(GREEDY)
    for _ in range(3):
        step(pace, text, 0.0, lambda tree: 0.9 * SECONDS[tree.size])
    assert pace.choose([text]) == ROOT


def test_plain_steps_that_a_busy_machine_once_made_slow_are_not_held_against_them_for_long() -> None:
    pace = Pace(sizes(), COSTS)
    for _ in range(3):  # plain steps are seen while something else runs
        chosen(pace, 0.0, 40, pace.begin(GREEDY))
        mine = pace.begin(GREEDY)
        for _ in range(30):
            step(pace, mine, 0.0, lambda tree: 1.3 * SECONDS[tree.size])
    mine = pace.begin(Sampling("exact", 1.0))
    found = [step(pace, mine, 0.0, lambda tree: SECONDS[tree.size]).size for _ in range(200)]
    assert found.count(ROOT.size) > 170 and set(found[-20:]) == {ROOT.size}


def test_one_step_that_was_held_up_moves_nothing() -> None:
    pace = Pace(sizes(), COSTS)
    text = pace.begin(GREEDY)
    for _ in range(20):
        step(pace, text, 0.5)
    before = pace.choose([text])
    assert before.size > 1
    step(pace, text, 0.5, lambda tree: 30.0)
    for _ in range(20):
        step(pace, text, 0.5)
    assert pace.choose([text]) is before


def test_a_tree_cut_by_the_contexts_end_teaches_nothing() -> None:
    pace = Pace(sizes(), COSTS)
    before, text = pace.luck, pace.begin(GREEDY)
    pace.record([Step([1], 1, 0, 0.0, 9.0, False, (0,), 2)], [text])
    assert pace.luck == before and pace.choose([text]) is FEW


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_at_a_pace_is_lossless(family: str, right: float) -> None:
    backbone = tiny_backbone(family)
    expected = plain(backbone)
    pace = Pace(sizes(), COSTS)
    steps = list(generate(backbone, Oracle(expected, right), pace, PROMPT, max_new_tokens=90, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == expected
    assert {s.nodes for s in steps[1:-8]} <= {ROOT.size, FEW.size, MANY.size}


@pytest.mark.parametrize("prefix", [0, 1])
def test_a_drafter_that_was_not_asked_for_a_while_finds_all_that_came(prefix: int, monkeypatch) -> None:
    """Trees of every size in turn, the root alone among them, drafted for one sequence and for many."""
    backbone = tiny_backbone("qwen3")
    heads = hydra(backbone, "own", prefix=prefix)

    class Turning(Pace):
        turn = 0

        def choose(self, texts) -> Tree:
            self.turn += 1
            return (ROOT, FEW, ROOT, ROOT, MANY)[self.turn % 5]

    seen: list[tuple[int, int]] = []
    inner = heads.draft

    def draft(backbone, sequences, confirmed, shape):
        seen.extend((one.start, len(one.tokens)) for one in confirmed)
        for one in confirmed:
            assert one.hidden.shape == (len(one.tokens), backbone.hidden_size)
        return inner(backbone, sequences, confirmed, shape)

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

    class Turning(Pace):
        turn = 0

        def choose(self, texts) -> Tree:
            self.turn += 1
            return (ROOT, FEW, MANY, ROOT, MANY, FEW)[self.turn % 6]

    torch.manual_seed(0)
    steps = list(generate(backbone, drafter, Turning(sizes(), COSTS), PROMPT, max_new_tokens=60, stop_ids=()))
    assert [t for s in steps for t in s.tokens] == plain(backbone, 60)
    assert {s.nodes for s in steps[1:]} >= {ROOT.size, FEW.size, MANY.size}
