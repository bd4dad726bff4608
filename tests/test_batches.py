"""Batches in which drafts do not pay: steps do what they do without a drafter, until sequences leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from medusa_cli.decode import AdaptivePolicy, Decoder, Request
from medusa_cli.decode.adaptive_policy import RESUME_STEPS
from medusa_cli.decode.decoder import CATCH_UP_TOKENS
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import Plan
from medusa_cli.model import Backbone
from medusa_cli.tree import Tree
from medusa_cli.tree.search import SizedTree, StepTimes
from tests.helpers import tiny_backbone
from tests.test_drafters import drafter_of

# Two rows cost no more than one, and each further row costs as much as a step.
TIMES = StepTimes({1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 64: 62.0}, {1: 0.0, 3: 0.0})
PROMPTS = [[5 + (7 * i + j * (3 + i)) % 50 for j in range(9 + i)] for i in range(8)]
KINDS = ["eagle", "hydra++-prompt", "amphista-prompt", "medusa", "firp"]


# Seven sequences may draft at no cost, and eight may not.
SEVEN = StepTimes({1: 1.0, 21: 1.0, 24: 8.0, 64: 48.0}, {1: 0.0, 3: 0.0})


class Clock(AdaptivePolicy):
    """Takes the times of steps from a table, and accepts what would be expected."""

    def __init__(self, trees: list[SizedTree], times: StepTimes) -> None:
        super().__init__(trees, times)
        self.times = times

    def record(self, sequences: Any, steps: Any) -> None:
        batch = len(steps)
        nodes = max(step.nodes for step in steps)
        took = self.times.step(nodes, 0, batch) / batch
        super().record(sequences, [replace(s, draft_s=0.0, verify_s=took) for s in steps])


def policy() -> AdaptivePolicy:
    return Clock([SizedTree(Tree.chain(2), 1.9)], TIMES)


@contextmanager
def watched(backbone: Backbone, drafter: HeadDrafter | None) -> Iterator[dict[str, list]]:
    """Records the passes of a backbone, and how many sequences and tokens the drafter reads."""
    seen: dict[str, list] = {"passes": [], "drafts": []}
    engine = backbone.engine
    forward, draft = engine.forward, type(drafter).draft if drafter is not None else None

    def run(plan: Plan, cache: Any) -> Any:
        seen["passes"].append((tuple(plan.tokens.shape), plan.taps, plan.extra_rows is None))
        return forward(plan, cache)

    def guess(self: Any, backbone: Backbone, sequences: Any, new: Any, tree: Any) -> Any:
        seen["drafts"].append([len(tokens.tokens) for tokens in new])
        return draft(self, backbone, sequences, new, tree)

    engine.forward = run
    if drafter is not None:
        type(drafter).draft = guess
    try:
        yield seen
    finally:
        del engine.forward
        if drafter is not None:
            type(drafter).draft = draft


def admit(decoder: Decoder, count: int, tokens: int) -> dict[int, list[int]]:
    """Admits requests without steps in between; returns the answers so far by number."""
    answers = {}
    for number in range(count):
        limit = tokens if number else 4 * tokens
        request = Request(PROMPTS[number], limit, stop_ids=())
        _, step = decoder.admit(request, number)
        answers[number] = list(step.tokens)
    return answers


def finish(decoder: Decoder, answers: dict[int, list[int]]) -> None:
    while decoder.sequences:
        for sequence, step in decoder.step():
            answers[sequence.number] += step.tokens


@pytest.mark.quick("eagle-native", "firp-native")
@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_drafts_does_what_plain_decoding_does(kind: str, engine: str) -> None:
    backbone = tiny_backbone(layers=4, engine=engine)
    drafter = drafter_of(backbone, kind)
    decoder = Decoder(backbone, drafter, policy(), slots=8)
    plain = Decoder(backbone, slots=8)
    with torch.inference_mode(), watched(backbone, drafter) as ours:
        answers = admit(decoder, 8, 20)
        ours["passes"].clear()
        for _ in range(19):
            for sequence, step in decoder.step():
                answers[sequence.number] += step.tokens
    with watched(backbone, None) as theirs:
        expected = admit(plain, 8, 20)
        theirs["passes"].clear()
        for _ in range(19):
            for sequence, step in plain.step():
                expected[sequence.number] += step.tokens
    assert ours["passes"] == theirs["passes"]
    assert not ours["drafts"]
    assert answers == expected
    assert len(decoder.sequences) == 1
    # Seven clients leave: some steps later, the drafter drafts again.
    with watched(backbone, drafter) as ours:
        finish(decoder, answers)
    finish(plain, expected)
    assert answers == expected
    assert ours["drafts"]
    reads_every_step = kind in ("eagle", "hydra++-prompt", "amphista-prompt")
    first = ours["drafts"][0][0]
    assert CATCH_UP_TOKENS <= first < 2 * RESUME_STEPS if reads_every_step else first == 1


@pytest.mark.parametrize(("batch", "drafts"), [(1, True), (2, True), (8, False)])
def test_a_batch_drafts_for_a_gain_that_covers_its_reading(batch: int, drafts: bool) -> None:
    """A tree that gives 8 % more tokens per second pays for few sequences, and not for many."""
    backbone = tiny_backbone(layers=2)
    times = StepTimes({1: 1.0, batch: 1.0, 2 * batch: 1.9 / 1.08}, {1: 0.0})
    clock = Clock([SizedTree(Tree.chain(1), 1.9)], times)
    decoder = Decoder(backbone, drafter_of(backbone, "medusa"), clock, slots=8)
    admit(decoder, batch, 4)
    steps = [step for _ in range(3) for _, step in decoder.step()]
    assert any(step.nodes > 1 for step in steps) == drafts


@pytest.mark.parametrize(("batch", "reads"), [(1, True), (8, False)])
def test_the_mean_of_many_texts_hardly_exceeds_what_is_expected(batch: int, reads: bool) -> None:
    """Drafts may pay for one text that is easier than expected, but not for eight."""
    times = StepTimes({1: 1.0, batch: 1.0, 2 * batch: 1.55}, {1: 0.0})
    assert Clock([SizedTree(Tree.chain(1), 1.6)], times).reads_states(batch) == reads


@pytest.mark.slow
def test_a_client_that_asks_again_starts_no_drafts() -> None:
    """A slot that is free for a step makes no batch draft; one that stays free does."""
    backbone = tiny_backbone(layers=4)
    drafter = drafter_of(backbone, "eagle")
    decoder = Decoder(backbone, drafter, Clock([SizedTree(Tree.chain(2), 1.9)], SEVEN), slots=8)
    with torch.inference_mode():
        for number in range(8):
            decoder.admit(Request(PROMPTS[number], 6 + 4 * number, stop_ids=()), number)
        decoder.step()
        with watched(backbone, drafter) as seen:
            for number in range(8, 20):
                while len(decoder.sequences) == 8:
                    decoder.step()
                decoder.step()
                request = Request(PROMPTS[number % 8], 40, stop_ids=())
                while len(decoder.sequences) < 8:
                    decoder.admit(request, number)
            assert not seen["drafts"]
            while decoder.sequences:
                decoder.step()
            assert seen["drafts"]
