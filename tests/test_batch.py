"""Decoding many prompts at once gives each what it gets alone, whatever is drafted and however many slots there are."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from medusa_cli.decode import Decoder, Request, Sampling, Stats, Step
from medusa_cli.drafters import Amphista, Draft, HydraHeads, MedusaHeads, NewTokens
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    FAMILIES,
    SPARSE,
    Oracle,
    answer,
    generate,
    generate_batch,
    generate_plain,
    tiny_backbone,
    tokens_of,
)

PROMPTS = [[5, 9, 20, 11, 7], [8], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40], [6, 6, 50], [12, 50], [9, 8, 7, 6]]


def plain(backbone: Backbone, prompt: Sequence[int], count: int = 40, **rules) -> list[int]:
    rules = {"stop_ids": (), **rules}
    return tokens_of(generate_plain(backbone, prompt, max_new_tokens=count, **rules))


def together(backbone: Backbone, drafter, tree, prompts=PROMPTS, count: int = 40, size: int = 4, **rules):
    """Each prompt's tokens, and its steps."""
    steps: list[list[Step]] = [[] for _ in prompts]
    rules = {"stop_ids": (), **rules}
    for number, step in generate_batch(
        backbone, drafter, tree, prompts, batch_size=size, max_new_tokens=count, **rules
    ):
        steps[number].append(step)
    return [tokens_of(one) for one in steps], steps


class Knowing(Oracle):
    """A stub that knows every prompt's answer, each to its own share; a sequence's fork learns which at prefill."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[list[int], float]]) -> None:
        super().__init__([], 0.0)
        self.answers = answers

    def first_input(self, prompt: NewTokens) -> NewTokens:
        return prompt

    def draft(self, backbone: Backbone, sequences, confirmed: Sequence[NewTokens], shape: Tree) -> list[Draft]:
        return [own.guess(backbone, one, shape) for own, one in zip(sequences, confirmed, strict=True)]

    def guess(self, backbone: Backbone, confirmed: NewTokens, tree: Tree) -> Draft:
        assert confirmed.hidden.shape == (len(confirmed.tokens), backbone.hidden_size)
        if confirmed.start == 0:
            self.prompt = tuple(confirmed.tokens.tolist())
        answer, right = self.answers[self.prompt]
        done = confirmed.start + len(confirmed.tokens) - len(self.prompt)
        assert answer[done : done + 1] in ([confirmed.root], [])
        tokens = [confirmed.root]
        for node in range(1, tree.size):
            ahead = answer[done + tree.depths[node] : done + tree.depths[node] + 1]
            good = float(torch.rand(1, generator=self.chance)) < right
            tokens.append(ahead[0] if good and ahead else 5)
        return Draft(torch.tensor(tokens), tree)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_rows_of_unequal_length_and_acceptance_decode_as_if_alone(family: str, engine: str) -> None:
    backbone, alone = tiny_backbone(family, engine=engine), tiny_backbone(family)
    expected = [plain(alone, prompt) for prompt in PROMPTS]
    shares = [1.0, 0.0, 0.5, 1.0, 0.3, 0.8]
    known = {tuple(p): (a, share) for p, a, share in zip(PROMPTS, expected, shares, strict=True)}
    found, steps = together(backbone, Knowing(known), SPARSE)
    assert found == expected
    rates = [Stats.of(one).acceptance_rate for one in steps]
    assert rates[0] > 3 > rates[2] > 1.2 > rates[1]  # they did not go in step


@pytest.mark.parametrize("size", [1, 2, 6, 20])
def test_without_a_drafter_it_is_plain_decoding_for_any_number_of_slots(size: int) -> None:
    backbone = tiny_backbone("qwen3")
    found, steps = together(backbone, None, None, size=size)
    assert found == [plain(backbone, prompt) for prompt in PROMPTS]
    assert all(step.drafted == 0 for one in steps for step in one)


def random_drafter(kind: type[HeadDrafter], backbone: Backbone, vocabulary: str = "own", **own) -> HeadDrafter:
    torch.manual_seed(1)
    ids = torch.randperm(backbone.vocab_size)[:20] if vocabulary == "draft" else None
    drafter = kind.create(backbone, 4, 2, vocabulary, ids, **own)
    for weight in drafter.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return drafter.eval()


KINDS = [
    (MedusaHeads, {}),
    (MedusaHeads, {"vocabulary": "draft"}),
    (MedusaHeads, {"vocabulary": "shared"}),
    (HydraHeads, {}),
    (HydraHeads, {"prefix_layers": 1, "matrices": "one"}),
    (Amphista, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "name", str(value)))
def test_every_drafter_drafts_for_a_row_what_it_drafts_for_it_alone(kind, options: dict) -> None:
    backbone = tiny_backbone()
    drafter = random_drafter(kind, backbone, **options)
    found, steps = together(backbone, drafter, SPARSE, size=3)
    for number, prompt in enumerate(PROMPTS):
        alone = list(generate(backbone, drafter, SPARSE, prompt, max_new_tokens=40, stop_ids=()))
        assert found[number] == tokens_of(alone) == plain(backbone, prompt)
        # Equal acceptance step by step: had a row read another's state, its guesses would differ.
        assert [(s.drafted, s.accepted) for s in steps[number]] == [(s.drafted, s.accepted) for s in alone]


def alike(together: list[Step], alone: list[Step]) -> bool:
    """Equal step by step, in what was drafted and what was accepted of it."""
    seen = [[(step.tokens, step.nodes, step.path) for step in one] for one in (together, alone)]
    return seen[0] == seen[1]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_dynamic_trees_grow_for_a_row_as_they_do_for_it_alone(kind, options: dict, engine: str) -> None:
    backbone = tiny_backbone("gemma3", engine=engine)
    drafter, growth = random_drafter(kind, backbone, **options), DynamicTree(9, 4, min_chance=0.1)
    found, steps = together(backbone, drafter, growth, size=3, count=25)
    for number, prompt in enumerate(PROMPTS):
        alone = list(generate(backbone, drafter, growth, prompt, max_new_tokens=25, stop_ids=()))
        assert found[number] == plain(backbone, prompt, 25) and alike(steps[number], alone)
    assert len({step.nodes for one in steps for step in one if not step.prefill}) > 1  # trees of several sizes


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("mode", ["exact", "typical"])
@pytest.mark.parametrize("shape", [SPARSE, DynamicTree(9, 4), None], ids=["static", "dynamic", "plain"])
def test_a_sampled_row_draws_with_the_seed_plus_its_number(
    mode: str, engine: str, shape: Tree | DynamicTree | None
) -> None:
    backbone = tiny_backbone(engine=engine)
    drafter = None if shape is None else random_drafter(HydraHeads, backbone)
    rule = Sampling(mode, 1.0, seed=3, epsilon=0.01, delta=0.05)
    found, steps = together(backbone, drafter, shape, [*PROMPTS, PROMPTS[0]], size=3, count=25, sampling=rule)
    for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        own = replace(rule, seed=3 + number)
        alone = list(generate(backbone, drafter, shape, prompt, max_new_tokens=25, stop_ids=(), sampling=own))
        assert alike(steps[number], alone)
    assert (found[0] != found[-1]) == (mode == "exact")  # the same prompt, drawn apart


@pytest.mark.parametrize("engine", ["eager", "fast"])
@pytest.mark.parametrize("shape", [SPARSE, DynamicTree(9, 4)], ids=["static", "dynamic"])
def test_a_cancelled_row_leaves_its_neighbours_as_they_were(engine: str, shape: Tree | DynamicTree) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    drafter = random_drafter(HydraHeads, backbone, prefix_layers=1)
    rule, limits = Sampling("exact", 1.0, seed=3), {"max_new_tokens": 30, "stop_ids": ()}

    def alone(number: int, prompt: Sequence[int]) -> list[int]:
        own = Sampling("exact", 1.0, seed=3 + number)
        return tokens_of(generate(backbone, drafter, shape, prompt, sampling=own, **limits))

    decoder, answers = Decoder(backbone, drafter, shape, slots=3), {}
    running = {}
    for number, prompt in enumerate(PROMPTS[:3]):
        sequence, first = decoder.admit(Request(prompt, sampling=rule, **limits), number)
        running[number], answers[number] = sequence, list(first.tokens)

    def step() -> None:
        for sequence, one in decoder.step():
            answers[sequence.number] += one.tokens

    step()
    step()
    assert not decoder.free_slots
    decoder.cancel(running[0])
    cut = list(answers[0])
    assert decoder.free_slots == 1 and running[0].done
    step()
    sequence, first = decoder.admit(Request(PROMPTS[3], sampling=rule, **limits), 3)  # in the place left
    answers[3] = list(first.tokens)
    decoder.cancel(running[0])  # once more: nothing happens
    while decoder.sequences:
        step()
    assert answers[0] == cut == alone(0, PROMPTS[0])[: len(cut)] and len(cut) < 30
    for number in (1, 2, 3):
        assert answers[number] == alone(number, PROMPTS[number]), number
    assert decoder.step() == []


def test_a_caller_that_stops_listening_frees_the_slot() -> None:
    backbone = tiny_backbone()
    decoder = Decoder(backbone, random_drafter(MedusaHeads, backbone), SPARSE)
    rules = {"max_new_tokens": 30, "stop_ids": ()}
    steps = answer(decoder, PROMPTS[0], **rules)
    next(steps)
    next(steps)
    assert not decoder.free_slots
    steps.close()
    assert decoder.free_slots == 1
    assert tokens_of(answer(decoder, PROMPTS[2], **rules)) == plain(backbone, PROMPTS[2], 30)


def test_the_context_limit_of_one_row_leaves_the_others_alone() -> None:
    backbone = tiny_backbone(positions=32)
    prompts = [PROMPTS[2] * 2, PROMPTS[1], PROMPTS[0]]
    expected = [plain(backbone, prompt, 100) for prompt in prompts]
    assert [len(one) for one in expected] == [10, 31, 27]
    known = {tuple(p): (a, 0.7) for p, a in zip(prompts, expected, strict=True)}
    assert together(backbone, Knowing(known), SPARSE, prompts, 100, size=2)[0] == expected


def test_stops_and_limits_are_each_rows_own() -> None:
    backbone = tiny_backbone()
    stop = plain(backbone, PROMPTS[0])[4]
    expected = [plain(backbone, prompt, 17, stop_ids=(stop,)) for prompt in PROMPTS]
    assert len({len(one) for one in expected}) > 1
    found, _ = together(backbone, random_drafter(MedusaHeads, backbone), SPARSE, count=17, stop_ids=iter((stop,)))
    assert found == expected


def test_one_pass_verifies_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    shapes = []
    inner = backbone.model.base_model.forward
    monkeypatch.setattr(
        backbone.model.base_model,
        "forward",
        lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or inner(*a, **k),
    )
    together(backbone, random_drafter(MedusaHeads, backbone), SPARSE, PROMPTS[:3], size=3)
    verified = [shape for shape in shapes if shape[1] == SPARSE.size]
    assert verified[0] == (3, SPARSE.size) and len(shapes) == 3 + len(verified)


def test_seconds_of_all_rows_add_up_to_no_more_than_the_whole() -> None:
    import time

    backbone = tiny_backbone()
    start = time.perf_counter()
    _, steps = together(backbone, random_drafter(MedusaHeads, backbone), SPARSE, size=6)
    assert 0 < sum(Stats.of(one).seconds for one in steps) <= time.perf_counter() - start


def test_what_cannot_be_batched_is_refused() -> None:
    backbone = tiny_backbone(positions=32)
    with pytest.raises(UserError, match="the prompt has 40 tokens"):
        together(backbone, None, None, [[5], [5] * 40])
    assert together(backbone, None, None, [])[0] == []
