"""Decoding is lossless for every drafter, tree and batch: a prompt gets the answer of plain decoding alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from medusa_cli.decode import Request, Sampling, Stats, Step
from medusa_cli.decode.decoder import CATCH_UP_TOKENS
from medusa_cli.drafters import Drafter
from medusa_cli.engine import Cache
from medusa_cli.errors import UsageError, UserError
from medusa_cli.model import Backbone
from medusa_cli.tree import Draft, DynamicTree, Tree
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    decoder_of,
    generate,
    generate_batch,
    generate_plain,
    medusa_drafter,
    plain,
    tiny_backbone,
    tokens_of,
)
from tests.test_drafters import drafter_of

TREES = {
    "dense": Tree.dense([3, 2, 2]),
    "chain": Tree.chain(4),
    "sparse": SPARSE,
    "root": Tree.root_only(),
}
SHALLOW = SPARSE.truncate(3)
PROMPTS = [
    [5, 9, 20, 11, 7],
    [8],
    [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40],
    [6, 6, 50],
    [12, 50],
    [9, 8, 7, 6],
]


def drafted(
    backbone: Backbone, drafter: Drafter | None, tree: Any, count: int = 60, **rules: Any
) -> list[Step]:
    """Returns the steps after PROMPT."""
    return list(
        generate(backbone, drafter, tree, PROMPT, max_new_tokens=count, **{"stop_ids": (), **rules})
    )


def alone(backbone: Backbone, prompt: Sequence[int], count: int = 40, **rules: Any) -> list[int]:
    """Returns the tokens of plain decoding."""
    return tokens_of(
        generate_plain(backbone, prompt, max_new_tokens=count, **{"stop_ids": (), **rules})
    )


def together(
    backbone: Backbone, drafter: Drafter | None, tree: Any, prompts: Any = PROMPTS, **rules: Any
) -> Any:
    """Returns each prompt's tokens and steps, four prompts at a time."""
    rules = {"stop_ids": (), "max_new_tokens": 40, "batch_size": 4, **rules}
    steps = generate_batch(backbone, drafter, tree, prompts, **rules)
    return [tokens_of(own) for own in steps], steps


def alike(ours: Sequence[Step], theirs: Sequence[Step]) -> bool:
    """Compares step by step what was drafted and what was accepted of it."""
    ours, theirs = (
        [(step.tokens, step.nodes, step.path) for step in steps] for steps in (ours, theirs)
    )
    return ours == theirs


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_token_identical(family: str) -> None:
    backbone = tiny_backbone(family)
    expected = plain(backbone, 40)
    assert len(set(expected)) > 3  # a constant answer would prove little
    for (name, tree), right in itertools.product(TREES.items(), (0.0, 0.5, 1.0)):
        steps = drafted(backbone, Oracle(expected, right), tree, 40)
        assert tokens_of(steps) == expected, (name, right)
        if right == 1.0:  # the last step may know too little of the future
            assert all(step.accepted == tree.max_depth for step in steps[1:-2]), name
        if right == 0.0:
            assert Stats.of(steps).acceptance_length < 1.3, name


@pytest.mark.quick("17")
@pytest.mark.parametrize("limit", [1, 2, 17, 30])
def test_max_new_tokens_is_exact(limit: int) -> None:
    backbone = tiny_backbone()
    tokens = tokens_of(drafted(backbone, Oracle(plain(backbone, 60), 1.0), TREES["dense"], limit))
    assert tokens == plain(backbone, limit)
    assert len(tokens) == limit


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_drafts_after_the_end_do_not_count_as_accepted(reason: str) -> None:
    backbone, chain = tiny_backbone(), TREES["chain"]
    whole = plain(backbone, 60)
    # The first token comes with the prompt, then five a step: a new token at these positions ends among the drafts.
    stop = next(t for i, t in enumerate(whole) if i > 5 and i % 5 in (2, 3) and t not in whole[:i])
    limits: dict[str, Any] = {"stop_ids": (stop,)} if reason == "stop" else {"count": 13}
    steps = drafted(backbone, Oracle(whole, 1.0), chain, **limits)
    assert tokens_of(steps) == whole[: whole.index(stop) + 1 if reason == "stop" else 13]
    assert 1 < len(steps[-1].tokens) <= chain.max_depth
    assert [step.accepted for step in steps[1:]] == [len(step.tokens) - 1 for step in steps[1:]]
    verified = sum(len(step.tokens) for step in steps[1:])
    assert Stats.of(steps).acceptance_length == pytest.approx(verified / (len(steps) - 1))


def test_answer_ends_within_the_context() -> None:
    backbone = tiny_backbone(positions=32)
    seen: list[int] = []
    inner = backbone.model.base_model.forward

    def spy(*args, **kwargs):
        seen.append(int(kwargs["position_ids"].max()))
        return inner(*args, **kwargs)

    backbone.model.base_model.forward = spy
    expected = plain(backbone, 100)
    assert len(expected) == 32 - len(PROMPT)
    for tree in TREES.values():
        assert tokens_of(drafted(backbone, Oracle(expected, 0.6), tree, 100)) == expected
    assert max(seen) < 32


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_cache_is_no_larger_than_the_context_needs(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(positions=300)
    caches: list[Cache] = []
    inner = backbone.engine.new_cache
    monkeypatch.setattr(
        backbone.engine,
        "new_cache",
        lambda *given, **how: caches.append(inner(*given, **how)) or caches[-1],
    )
    steps = drafted(backbone, medusa_drafter(backbone) if drafts else None, SPARSE, 1_000_000)
    assert len(tokens_of(steps)) == 300 - len(PROMPT)
    # Capacities double.
    assert len(caches) == 1
    assert 300 <= caches[0].capacity < 2 * (300 + SPARSE.size)


def test_prompts_and_limits_are_checked() -> None:
    backbone = tiny_backbone(positions=32)
    with pytest.raises(UserError, match="40"):
        alone(backbone, [5] * 40)
    with pytest.raises(UsageError, match="max_new_tokens"):
        alone(backbone, PROMPT, 0)
    with pytest.raises(UserError, match="empty"):
        alone(backbone, [])
    assert together(backbone, None, None, [])[0] == []


def test_one_backbone_pass_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, shapes = tiny_backbone(), []
    base = backbone.model.base_model
    inner = base.forward
    monkeypatch.setattr(
        base,
        "forward",
        lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or inner(*a, **k),
    )
    assert len(drafted(backbone, medusa_drafter(backbone), SPARSE, 40)) == len(shapes)
    shapes.clear()
    together(backbone, medusa_drafter(backbone), SPARSE, PROMPTS[:3], batch_size=3)
    verified = [shape for shape in shapes if shape[1] == SPARSE.size]
    assert verified[0] == (3, SPARSE.size)
    assert len(shapes) == 3 + len(verified)


@pytest.mark.slow
def test_sampling_depends_on_the_seed_and_typical_accepts_more() -> None:
    backbone = tiny_backbone()
    heads = medusa_drafter(backbone)

    def run(sampling: Sampling) -> list[int]:
        return tokens_of(drafted(backbone, heads, SPARSE, 40, sampling=sampling))

    assert run(Sampling("exact", 1.0, seed=3)) == run(Sampling("exact", 1.0, seed=3))
    assert run(Sampling("exact", 1.0, seed=3)) != run(Sampling("exact", 1.0, seed=4))
    assert run(Sampling("typical", 0.0)) == plain(backbone, 40)
    loose = Sampling("typical", 2.0, epsilon=1e-6, delta=1e-6)
    assert Stats.of(drafted(backbone, heads, SPARSE, 40, sampling=loose)).acceptance_length > 3


@pytest.mark.quick("whole")
@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.8}, {"top_k": 6}], ids=["whole", "nucleus", "top-k"]
)
def test_sampling_gives_what_plain_sampling_with_the_seed_gives(cuts: dict) -> None:
    backbone = tiny_backbone("qwen3")
    sampling = Sampling("exact", 1.2, seed=5, **cuts)
    expected = plain(backbone, 60, sampling=sampling)
    assert len(set(expected)) > 10
    for right in (0.0, 0.5, 1.0):
        steps = drafted(backbone, Oracle(expected, right), SPARSE, sampling=sampling)
        assert tokens_of(steps) == expected
        assert Stats.of(steps).acceptance_length > 3 or right < 1.0


@cache
def references(family: str) -> list[list[int]]:
    """Returns a family's plain answers to PROMPTS on transformers' layers."""
    return [alone(tiny_backbone(family), prompt) for prompt in PROMPTS]


@pytest.mark.quick("torch-mistral-window")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_rows_of_unequal_length_and_acceptance_decode_as_if_alone(family: str, engine: str) -> None:
    backbone, expected = tiny_backbone(family, engine=engine), references(family)
    shares = [1.0, 0.0, 0.5, 1.0, 0.3, 0.8]
    known = {tuple(p): (a, share) for p, a, share in zip(PROMPTS, expected, shares, strict=True)}
    tokens, steps = together(backbone, Oracle([], 0, known), SPARSE)
    assert tokens == expected
    rates = [Stats.of(own).acceptance_length for own in steps]
    assert rates[0] > 3 > rates[2] > 1.2 > rates[1]


@pytest.mark.slow
def test_plain_batches_of_any_size() -> None:
    backbone = tiny_backbone("qwen3")
    expected = [alone(backbone, prompt) for prompt in PROMPTS]
    for size in (1, 2, 6, 20):
        tokens, steps = together(backbone, None, None, batch_size=size)
        assert tokens == expected
        assert all(step.nodes == 1 for own in steps for step in own)


@pytest.mark.quick("plain-exact-eager")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("mode", ["exact", "typical"])
@pytest.mark.parametrize(
    "tree", [SHALLOW, DynamicTree(9, 3), None], ids=["static", "dynamic", "plain"]
)
def test_sampled_row_draws_with_the_seed_plus_its_number(
    mode: str, engine: str, tree: Tree | DynamicTree | None
) -> None:
    backbone = tiny_backbone(engine=engine)
    drafter = None if tree is None else drafter_of(backbone, "hydra")
    sampling, prompts = (
        Sampling(mode, 1.0, seed=3, epsilon=0.01, delta=0.05),
        [*PROMPTS[:3], PROMPTS[0]],
    )
    tokens, steps = together(
        backbone, drafter, tree, prompts, batch_size=3, max_new_tokens=16, sampling=sampling
    )
    for number, prompt in enumerate(prompts):
        rules = {
            "max_new_tokens": 16,
            "stop_ids": (),
            "sampling": replace(sampling, seed=3 + number),
        }
        assert alike(steps[number], list(generate(backbone, drafter, tree, prompt, **rules)))
    assert (tokens[0] != tokens[-1]) == (mode == "exact")


@pytest.mark.quick("dynamic-native", "static-torch")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("tree", [SHALLOW, DynamicTree(9, 3)], ids=["static", "dynamic"])
def test_cancelled_row_leaves_the_others_as_they_were(
    engine: str, tree: Tree | DynamicTree
) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    drafter = drafter_of(backbone, "hydra++")
    limits: dict[str, Any] = {"max_new_tokens": 30, "stop_ids": ()}
    decoder, answers = decoder_of(backbone, drafter, tree, slots=3), {}

    def admit(number: int) -> Any:
        request = Request(PROMPTS[number], sampling=Sampling("exact", 1.0, seed=3), **limits)
        sequence, first = decoder.admit(request, number)
        answers[number] = list(first.tokens)
        return sequence

    def step() -> None:
        for sequence, new in decoder.step():
            answers[sequence.number] += new.tokens

    first, *_ = [admit(number) for number in range(3)]
    step()
    step()
    assert not decoder.free_slots
    first.cancel()
    cancelled = list(answers[0])
    assert decoder.free_slots == 1
    assert first.done
    step()
    admit(3)  # takes the free slot
    first.cancel()  # has no effect any more
    while decoder.sequences:
        step()
    for number in range(4):
        sampling = Sampling("exact", 1.0, seed=3 + number)
        whole = tokens_of(
            generate(backbone, drafter, tree, PROMPTS[number], sampling=sampling, **limits)
        )
        assert answers[number] == (whole if number else whole[: len(cancelled)]), number
    assert answers[0] == cancelled
    assert len(cancelled) < 30
    assert decoder.step() == []


@pytest.mark.quick("eagle-draft-native")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("kind", [None, "eagle-draft", "firp"])
def test_pieces_of_a_prompt_let_others_take_steps(
    kind: str | None, engine: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 4)
    backbone = tiny_backbone("qwen3", layers=4, engine=engine)
    decoder = decoder_of(backbone, kind and drafter_of(backbone, kind), SHALLOW, slots=3)
    long, answers = [*range(5, 26)], dict[int, list[int]]()
    # The second one ends while the prompt is run, whose slot then moves.
    for number, count in enumerate((40, 3)):
        answers[number] = list(
            decoder.admit(Request(PROMPTS[0], count, stop_ids=()), number)[1].tokens
        )
    pieces = 0
    for sequence, first in decoder.prefill(Request(long, 20, stop_ids=()), 2):
        pieces += 1
        if first is None:
            assert not sequence.done
            assert sequence not in decoder.sequences
            assert decoder.free_slots <= 1
            for other, step in decoder.step():
                answers[other.number] += step.tokens
        else:
            answers[2] = list(first.tokens)
    while decoder.sequences:
        for other, step in decoder.step():
            answers[other.number] += step.tokens
    assert pieces == 7
    for number, (prompt, count) in enumerate(((PROMPTS[0], 40), (PROMPTS[0], 3), (long, 20))):
        assert answers[number] == alone(backbone, prompt, count)


def test_prompt_given_up_between_its_pieces_frees_the_slot(monkeypatch: Any) -> None:
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 4)
    backbone = tiny_backbone()
    decoder = decoder_of(backbone, drafter_of(backbone, "eagle-draft"), SHALLOW)
    pieces = decoder.prefill(Request([*range(5, 26)], 20, stop_ids=()))
    next(pieces)
    next(pieces)
    assert not decoder.free_slots
    pieces.close()
    assert decoder.free_slots == 1
    assert tokens_of(answer(decoder, [*range(5, 30)], max_new_tokens=20, stop_ids=())) == alone(
        backbone, [*range(5, 30)], 20
    )


def test_a_draft_of_other_sizes_than_its_tree_is_refused() -> None:
    class Wrong(Oracle):
        def __init__(self, count: int) -> None:
            super().__init__([], 1.0)
            self.count = count

        def draft(self, backbone: Any, sequences: Any, new: Any, tree: Any) -> list[Draft]:
            return [Draft(torch.zeros(self.count, dtype=torch.long), tree) for _ in new]

    backbone = tiny_backbone()
    for count in (1, SPARSE.size - 1, SPARSE.size + 1, 500):
        with pytest.raises(ValueError, match="do not fit a tree"):
            drafted(backbone, Wrong(count), SPARSE)
    with pytest.raises(ValueError):
        Draft(torch.zeros(1, SPARSE.size, dtype=torch.long), SPARSE)


def test_a_drafter_cannot_replace_the_root() -> None:
    class Wrong(Oracle):
        def draft(self, backbone: Any, sequences: Any, new: Any, tree: Any) -> list[Draft]:
            return [Draft(torch.full((tree.size,), 7), tree) for _ in new]

    backbone = tiny_backbone()
    assert tokens_of(drafted(backbone, Wrong([], 1.0), SPARSE)) == tokens_of(
        drafted(backbone, None, None)
    )


@pytest.mark.parametrize("kind", [None, "medusa", "eagle-draft"])
def test_interrupted_step_ends_its_answers_and_leaves_a_right_prefix(
    kind: str | None, monkeypatch: Any
) -> None:
    backbone = tiny_backbone(layers=4)
    expected, drafter = plain(backbone, 20), None if kind is None else drafter_of(backbone, kind)
    decoder = decoder_of(backbone, drafter, SPARSE.truncate(3) if kind else None, slots=2)
    sequences = [decoder.admit(Request(PROMPT, 20, stop_ids=()), number)[0] for number in range(2)]
    decoder.step()
    with monkeypatch.context() as patch:
        patch.setattr(
            sequences[0], "commit", lambda *kept: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            decoder.step()
    assert [sequence.finish_reason for sequence in sequences] == ["cancelled"] * 2
    assert decoder.step() == []
    assert tokens_of(answer(decoder, PROMPT, max_new_tokens=20, stop_ids=())) == expected


def test_context_limit_of_one_row_leaves_the_others_alone() -> None:
    backbone = tiny_backbone(positions=32)
    prompts = [PROMPTS[2] * 2, PROMPTS[1], PROMPTS[0]]
    expected = [alone(backbone, prompt, 100) for prompt in prompts]
    assert [len(tokens) for tokens in expected] == [10, 31, 27]
    known = {tuple(p): (a, 0.7) for p, a in zip(prompts, expected, strict=True)}
    assert (
        together(backbone, Oracle([], 0, known), SPARSE, prompts, max_new_tokens=100, batch_size=2)[
            0
        ]
        == expected
    )


def test_stops_and_limits_are_each_rows_own() -> None:
    backbone = tiny_backbone()
    stop = alone(backbone, PROMPTS[0])[4]
    expected = [alone(backbone, prompt, 17, stop_ids=(stop,)) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1
    drafter = medusa_drafter(backbone)
    assert together(backbone, drafter, SPARSE, max_new_tokens=17, stop_ids=(stop,))[0] == expected


@pytest.mark.quick("amphista-prompt-native", "hydra++-prompt-native")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("kind", ["eagle-draft", "hydra++-prompt", "amphista-prompt"])
def test_a_drafter_reads_the_end_of_a_long_prompt(
    kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.drafters.heads.PROMPT_TOKENS", 6)
    monkeypatch.setattr("medusa_cli.engine.engine.PREFILL_ROWS", 4)
    backbone = tiny_backbone("qwen3", layers=4, engine=engine)
    drafter = drafter_of(backbone, kind)
    read: list[tuple[int, int]] = []
    draft = type(drafter).draft

    def watched(self: Any, backbone: Backbone, sequences: Any, new: Any, tree: Any) -> Any:
        read.extend((tokens.start, tokens.end) for tokens in new)
        return draft(self, backbone, sequences, new, tree)

    monkeypatch.setattr(type(drafter), "draft", watched)
    decoder = decoder_of(backbone, drafter, SHALLOW)
    text = [*range(5, 26)]
    longer = [*text, *alone(backbone, text, 12), *text]
    # The third prompt parts from the second before all that the drafter has read.
    for prompt, reused in (
        (text, 0),
        (longer, 32),
        ([*text[:9], 3, 3], 9),
        ([*text[:9], 3, 4, *text], 10),
    ):
        read.clear()
        sequence, first = decoder.admit(Request(prompt, 12, stop_ids=()))
        tokens = list(first.tokens)
        while not sequence.done:
            tokens += [token for _, step in decoder.step() for token in step.tokens]
        assert tokens == alone(backbone, prompt, 12)
        assert sequence.reused in (reused, reused - 1)
        assert read[0][1] == len(prompt)
        assert read[0][1] - read[0][0] <= max(6, CATCH_UP_TOKENS)
