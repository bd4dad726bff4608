"""A slot keeps its text: the prefix that a prompt shares with it is not run again, and changes no answer."""

import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.decode import Request, Sampling
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import Cache
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.native.pages import drop_pages, lazy_zeros
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    SPARSE,
    answer,
    attach,
    decoder_of,
    forward,
    generate,
    generate_plain,
    medusa_drafter,
    rows_of,
    steps_of,
    tiny_backbone,
    tiny_tokenizer,
    tokens_of,
)
from tests.models import tiny_network
from tests.test_drafters import drafter_of

OPENING = [5, 9, 20, 11, 7, 31, 8, 44, 10, 12]
RULES: dict[str, Any] = {"max_new_tokens": 17, "stop_ids": ()}
ANSWERS = ("hydra++", "amphista")  # these see an answer from where it was run on
PROMPTS = ("amphista-prompt", "eagle-draft")  # their last row was told of the next token
KINDS = (None, "medusa", "hydra-draft", *ANSWERS, "hydra++-prompt", *PROMPTS, "firp")
STATIC = SPARSE.truncate(3)


def make(backbone: Backbone, kind: str | None) -> HeadDrafter | None:
    return None if kind is None else drafter_of(backbone, kind)


def backbone_of(engine: str, family: str = "llama") -> Backbone:
    return tiny_backbone(family, layers=6, engine=engine)


def counting(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each pass adds its number of tokens."""
    rows: list[int] = []
    inner = backbone.engine.forward

    def forward(plan: Any, cache: Cache) -> Any:
        rows.append(plan.tokens.numel())
        return inner(plan, cache)

    monkeypatch.setattr(backbone.engine, "forward", forward)
    return rows


@pytest.mark.quick("amphista-static")
@pytest.mark.parametrize(
    ("engine", "shape", "sampling"),
    [
        ("native", STATIC, Sampling()),
        ("eager", DynamicTree(9, 3), Sampling()),
        ("native", STATIC, Sampling("exact", 1.0, seed=5)),
    ],
    ids=["static", "dynamic", "sampled"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_later_turn_runs_only_new_tokens(
    kind: str | None,
    shape: Tree | DynamicTree,
    engine: str,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone, rules = backbone_of(engine), {**RULES, "sampling": sampling}
    drafter = make(backbone, kind)
    decoder, rows = decoder_of(backbone, drafter, shape), counting(backbone, monkeypatch)
    prompt, before = list(OPENING), 0
    for new in ([21, 22, 23], [40, 41], []):
        rows.clear()
        steps = list(answer(decoder, prompt, **rules))
        # What the slot holds is all but the answer's last token, at times a few more.
        assert rows[0] == len(prompt) if not before else 0 < rows[0] <= len(prompt) - before
        assert tokens_of(steps) == tokens_of(generate_plain(backbone, prompt, **rules))
        if kind not in ANSWERS:
            alone = list(generate(backbone, drafter, shape, prompt, **rules))
            assert [(s.tokens, s.path) for s in steps] == [(s.tokens, s.path) for s in alone]
        before = len(prompt) + RULES["max_new_tokens"] - 1
        prompt = [*prompt, *tokens_of(steps), *new]


@pytest.mark.quick("None")
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_with_a_common_beginning_runs_the_rest(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of("native", "gemma3")
    decoder = decoder_of(backbone, make(backbone, kind), STATIC)
    rows = counting(backbone, monkeypatch)
    list(answer(decoder, OPENING, **RULES))
    for prompt, fresh in (
        ([*OPENING[:6], 50, 51], 2),
        # The same again: its last token is run, as its states are wanted.
        (
            [*OPENING[:6], 50, 51],
            1,
        ),
        ([*OPENING[:3]], 1),  # shorter than what is before
        ([60, 61, 62], 3),
    ):
        rows.clear()
        tokens = tokens_of(answer(decoder, prompt, **RULES))
        assert fresh <= rows[0] <= fresh + (kind in PROMPTS)
        assert tokens == tokens_of(generate_plain(backbone, prompt, **RULES))


def test_reuse_ends_at_a_limit_and_with_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder, rows = decoder_of(backbone, slots=2), counting(backbone, monkeypatch)
    for limit, rows_now in ((None, 10), (4, 6), (0, 10), (None, 1), (None, 10)):
        rows.clear()
        sequence, _ = decoder.admit(Request(OPENING, reuse=limit, **RULES))
        sequence.cancel()
        assert rows == [rows_now]
        if rows_now == 1:
            decoder.prefixes.clear()


def test_short_common_beginning_does_not_cost_a_long_text_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = backbone_of("native")
    decoder, rows = decoder_of(backbone, slots=2), counting(backbone, monkeypatch)
    texts = [OPENING, [*OPENING[:2], 40, 41]]
    for turn in range(3):
        for number, prompt in enumerate(texts):
            rows.clear()
            tokens = tokens_of(answer(decoder, prompt, **RULES))
            assert rows[0] == len(prompt) if not turn else rows[0] <= 2
            texts[number] = [*prompt, *tokens, 7]


def test_prompt_takes_a_free_slot_and_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder = decoder_of(backbone, slots=3)
    first, *_ = [
        decoder.admit(Request(prompt, **RULES))[0] for prompt in (OPENING, [8, 9], [33, 34, 35])
    ]
    moved: list[tuple[int, int]] = []
    inner = decoder.cache.swap
    monkeypatch.setattr(decoder.cache, "swap", lambda a, b: (moved.append((a, b)), inner(a, b)))
    first.cancel()
    assert decoder.free_slots == 1
    late, step = decoder.admit(Request([12, 13], **RULES))
    steps = [step, *(step for own, step in [*decoder.step(), *decoder.step()] if own is late)]
    assert moved == []
    assert decoder.sequences[0] is late
    plain = tokens_of(generate_plain(backbone, [12, 13], **RULES))
    assert tokens_of(steps) == plain[:3]


@pytest.mark.quick("None")
@pytest.mark.parametrize("kind", KINDS)
def test_slot_with_the_longest_common_prefix_is_taken(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of("native", "qwen3")
    decoder = decoder_of(backbone, make(backbone, kind), STATIC, slots=3)
    rows = counting(backbone, monkeypatch)
    opened = [OPENING, OPENING[::-1], [33, 34, 35, 36]]

    def together(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        answers, prefilled = list[list[int]](), []
        for number, prompt in enumerate(prompts):
            rows.clear()
            answers.append(list(decoder.admit(Request(prompt, **RULES), number)[1].tokens))
            prefilled.append(rows[0])
        while decoder.sequences:
            for sequence, step in decoder.step():
                answers[sequence.number] += step.tokens
        return answers, prefilled

    first, prefilled = together(opened)
    assert prefilled == [10, 10, 4]
    # In another order than before, each with its own answer behind it.
    later = [[*opened[i], *first[i], 25 + i] for i in (2, 0, 1)]
    second, prefilled = together(later)
    assert all(count <= 2 for count in prefilled)
    for prompt, tokens in zip([*opened, *later], [*first, *second], strict=True):
        assert tokens == tokens_of(generate_plain(backbone, prompt, **RULES))


@pytest.mark.quick("None")
@pytest.mark.parametrize("kind", KINDS)
def test_turn_after_a_plain_one_runs_only_new_tokens(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of("native")
    decoder = decoder_of(backbone, make(backbone, kind), STATIC)
    rows = counting(backbone, monkeypatch)
    prompt = OPENING
    for speculative in (False, True):
        rows.clear()
        tokens = tokens_of(answer(decoder, prompt, speculative=speculative, **RULES))
        assert speculative is False or rows[0] <= 3
        assert tokens == tokens_of(generate_plain(backbone, prompt, **RULES))
        prompt = [*prompt, *tokens, 21, 22]


def test_cancelled_answer_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder, rows = (
        decoder_of(backbone, medusa_drafter(backbone), SPARSE),
        counting(backbone, monkeypatch),
    )
    steps = answer(decoder, OPENING, **RULES)
    partial = [*next(steps).tokens, *next(steps).tokens, *next(steps).tokens]
    steps.close()
    rows.clear()
    prompt = [*OPENING, *partial, 7, 8]
    tokens = tokens_of(answer(decoder, prompt, **RULES))
    assert rows[0] == 3
    assert tokens == tokens_of(generate_plain(backbone, prompt, **RULES))


@pytest.mark.quick("None-eager")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_growing_cache_changes_nothing(
    kind: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, roomy = backbone_of(engine), backbone_of(engine)
    new_cache, rules = backbone.engine.new_cache, {"max_new_tokens": 20, "stop_ids": ()}
    monkeypatch.setattr(
        backbone.engine, "new_cache", lambda slots=1, **how: new_cache(slots, 2, **how)
    )
    # The fast one grows by blocks of 256.
    prompts = [
        OPENING,
        [8],
        OPENING[::-1] * (2 if engine == "eager" else 25),
    ]
    decoder = decoder_of(backbone, make(backbone, kind), STATIC, slots=3)
    before = decoder.cache.capacity
    answers = steps_of(decoder, [Request(prompt, **rules) for prompt in prompts])
    assert decoder.cache.capacity > before
    for prompt, steps in zip(prompts, answers, strict=True):
        assert tokens_of(steps) == tokens_of(generate_plain(roomy, prompt, **rules))


@pytest.mark.quick("eager")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
def test_rows_survive_growing_keeping_swapping_and_truncating(engine: str) -> None:
    backbone = backbone_of(engine)
    cache = backbone.engine.new_cache(2, 2)
    tree = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
    forward(backbone, OPENING, cache, slot=0)
    forward(backbone, OPENING[:4], cache, slot=1)
    before = [rows_of(cache, slot).clone() for slot in (0, 1)]
    forward(backbone, range(20, 26), cache, tree, slot=0)
    assert cache.lengths == [10, 4]  # a tree's rows stay once they are kept
    cache.keep(0, [0, 2, 5])
    assert cache.lengths == [13, 4]
    assert torch.equal(rows_of(cache, 0)[:, :, :, :10], before[0])
    alone = backbone.engine.new_cache(1, 64)
    forward(backbone, [*OPENING, 20, 22, 25], alone)
    assert torch.allclose(rows_of(cache, 0), rows_of(alone), atol=1e-4)
    whole = rows_of(cache, 0).clone()
    cache.swap(0, 1)
    assert cache.lengths == [4, 13]
    assert torch.equal(rows_of(cache, 0), before[1])
    assert torch.equal(rows_of(cache, 1), whole)
    capacity = cache.capacity
    cache.reserve(4 * capacity)
    assert cache.capacity == 4 * capacity
    assert torch.equal(rows_of(cache, 1), whole)
    cache.truncate(1, 10)
    assert cache.lengths == [4, 10]
    assert torch.equal(rows_of(cache, 1), before[0])
    cache.truncate(1, 12)  # nothing to forget
    assert cache.lengths == [4, 10]


@pytest.mark.quick("lfm2-torch", "llama-torch", "qwen3_5_text-torch", "qwen3_moe-torch")
@pytest.mark.parametrize("engine", ["eager", "native", "torch"])
@pytest.mark.parametrize("model", ["llama", "lfm2", "qwen3_5_text", "qwen3_moe"])
def test_copied_rows_and_states_have_the_bits_of_run_ones(engine: str, model: str) -> None:
    backbone = Backbone(tiny_network(model), tiny_tokenizer(128))
    try:
        attach(backbone, engine)
    except UserError as reason:
        pytest.skip(reason.text)
    chance = torch.Generator().manual_seed(1)
    text = torch.randint(5, 128, (50,), generator=chance)
    cache = backbone.engine.new_cache(2, 1)
    forward(backbone, text[:37], cache, slot=0, logits="none")
    states = cache.states_after(0, 37)
    parts = [(0, 16, cache.rows(0, 0, 16)), (16, 37, cache.rows(0, 16, 37))]
    expected = forward(backbone, text[37:], cache, slot=0).logits.clone()
    assert cache.states_after(0, 5) == (None if cache.stateful else [])

    assert states is not None
    for start, end, rows in parts:
        cache.fill(1, start, end, rows)
    cache.set_states(1, states)
    assert cache.lengths == [50, 37]
    assert cache.reusable(1, 37) == 37
    assert torch.equal(forward(backbone, text[37:], cache, slot=1).logits, expected)
    with torch.inference_mode():
        cache.truncate(1, 37)
    assert torch.equal(forward(backbone, text[37:], cache, slot=1).logits, expected)
    with pytest.raises(ValueError, match="another cache"):
        cache.fill(1, 0, 16, [part.double() for part in parts[0][2]])


@pytest.mark.quick("3-120")
@pytest.mark.parametrize("shared", [0, 120])
@pytest.mark.parametrize("slots", [2, 3])
def test_title_requests_do_not_cost_a_long_talk_its_slot(
    slots: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(vocab=64, engine="native", positions=2048)
    decoder, rows = decoder_of(backbone, slots=slots), counting(backbone, monkeypatch)
    chance = torch.Generator().manual_seed(7)

    def text(count: int) -> list[int]:
        return torch.randint(5, 60, (count,), generator=chance).tolist()

    system = text(shared)
    talk = [*system, *text(150)]
    for turn in range(10):
        rows.clear()
        tokens = tokens_of(answer(decoder, talk, **RULES))
        assert turn == 0 or rows[0] <= 12
        for _ in range(3):
            # Its instructions may be those of the talk, which are copied.
            rows.clear()
            list(answer(decoder, [*system, *text(20)], max_new_tokens=4, stop_ids=()))
            assert rows[0] == 20
        talk = [*talk, *tokens, *text(10)]
    assert tokens == tokens_of(generate_plain(backbone, talk[: -10 - len(tokens)], **RULES))


@pytest.mark.quick("eager-None")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_a_running_text_is_copied_to_a_request_with_the_same_beginning(
    kind: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(layers=6, engine=engine, positions=512)
    decoder = decoder_of(backbone, make(backbone, kind), STATIC, slots=2)
    rows = counting(backbone, monkeypatch)
    system = OPENING * 10
    first, step = decoder.admit(Request([*system, 21], **RULES))
    decoder.step()
    rows.clear()
    second, late = decoder.admit(Request([*system, 22, 23], **RULES))
    assert 2 <= rows[0] <= 3
    answers = {first: [], second: list(late.tokens)}
    while decoder.sequences:
        for sequence, later in decoder.step():
            answers[sequence] += later.tokens
    plain = tokens_of(generate_plain(backbone, [*system, 22, 23], **RULES))
    assert answers[second] == plain
    assert first.tokens[: len(system)] == system


def test_an_old_text_gives_its_slot_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder, rows = decoder_of(backbone, slots=2), counting(backbone, monkeypatch)
    now = 0.0
    monkeypatch.setattr("medusa_cli.decode.prefix_cache.time.monotonic", lambda: now)
    for prompt, minutes in ((OPENING * 3, 0), (OPENING[::-1], 120), ([40, 41, 42], 0)):
        now += 60 * minutes
        list(answer(decoder, prompt, **RULES))
    for prompt, reused in (([*OPENING[::-1], 7], True), ([*OPENING * 3, 7], False)):
        rows.clear()
        list(answer(decoder, prompt, **RULES))
        assert (rows[0] < 5) == reused


def test_memory_is_taken_from_the_text_that_is_worth_least(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder = decoder_of(backbone, slots=3)
    now = 0.0
    monkeypatch.setattr("medusa_cli.decode.prefix_cache.time.monotonic", lambda: now)
    for prompt in (OPENING, OPENING[::-1]):
        list(answer(decoder, prompt, **RULES))
        now += 600
    row = backbone.engine.row_bytes
    # Some memory is free once a text is dropped.
    free = iter([40, 40, 80, 80, 80, 80])
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: next(free) * row)
    decoder.admit(Request([40, 41, 42], 60, stop_ids=()))
    left = [own.tokens[0] for own in decoder.prefixes._slots if own is not None and own.done]
    assert left == [OPENING[-1]]


def test_memory_is_shared_by_slots_of_a_lazy_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder = decoder_of(backbone, slots=3)
    row = backbone.engine.row_bytes

    def give(rows: int) -> None:
        monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: rows * row)

    give(200)
    long, short = Request(OPENING, 120, stop_ids=()), Request(OPENING[:1], 10, stop_ids=())
    assert decoder.has_room(long)
    first, _ = decoder.admit(long)
    # Each sequence counts with its maximum length.
    assert not decoder.has_room(long)
    assert decoder.has_room(short)
    while not first.done:
        decoder.step()
    give(0)
    # The rows of the finished one are in memory already.
    again = Request(first.tokens[:100], 5, stop_ids=())
    assert decoder.has_room(again)
    assert decoder.admit(again)[0].reused
    with pytest.raises(UserError, match="max_new_tokens"):
        decoder.admit(long)


def test_memory_of_idle_slots_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("native")
    decoder = decoder_of(backbone, slots=2)
    expected = tokens_of(answer(decoder, OPENING, **RULES))
    assert decoder.cache.lengths[0]
    row = backbone.engine.row_bytes
    other = Request([40, 41, 42], 60, stop_ids=())
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: 100 * row)
    decoder.has_room(Request([40, 41, 42], 120, stop_ids=()))
    assert not any(decoder.cache.lengths)
    decoder.admit(other)
    assert tokens_of(answer(decoder, OPENING, **RULES)) == expected


def test_lazy_zeros_take_memory_when_they_are_written() -> None:
    zeros = lazy_zeros(4, 1 << 26)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    if not sys.platform.startswith("linux"):
        pytest.skip("no /proc")
    before = resident()
    zeros[1, : 1 << 24] = 1
    assert resident() - before > 50 << 20
    drop_pages(zeros[1])
    assert resident() - before < 10 << 20
    assert not zeros[1, : 1 << 24].any()
