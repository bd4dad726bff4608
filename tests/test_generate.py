"""Decoding is lossless whatever is drafted: always right, never right, sometimes right, on every family."""

import pytest
import torch

from medusa_cli.decode import Request, Sampling, Stats
from medusa_cli.decode.sequence import StopCriteria
from medusa_cli.engine import Cache
from medusa_cli.errors import UsageError, UserError
from medusa_cli.tree import Tree
from tests.helpers import (
    END_ID,
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    generate,
    generate_batch,
    generate_plain,
    medusa_drafter,
    plain,
    tiny_backbone,
    tokens_of,
)

TREES = {"dense": Tree.dense([3, 2, 2]), "chain": Tree.chain(4), "sparse": SPARSE, "root": Tree.root_only()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_greedy_is_token_identical(family: str, shape: str, right: float) -> None:
    backbone = tiny_backbone(family)
    expected = plain(backbone)
    assert len(set(expected)) > 3  # a constant answer would prove little
    oracle = Oracle(expected, right)
    steps = list(generate(backbone, oracle, TREES[shape], PROMPT, max_new_tokens=90, stop_ids=()))
    assert tokens_of(steps) == expected
    stats = Stats.of(steps)
    if right == 1.0:
        # Every step but perhaps the last, which may know too little of the future, accepts a whole path.
        assert all(step.accepted == TREES[shape].max_depth for step in steps[1:-2])
    if right == 0.0:
        assert stats.acceptance_rate < 1.3


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_the_models_own_greedy_decoding(family: str) -> None:
    backbone = tiny_backbone(family)
    ours = plain(backbone, 40)
    backbone.model.set_attn_implementation("eager")
    theirs = backbone.model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert theirs[0, len(PROMPT) :].tolist() == ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocabulary", ["own", "draft", "shared"])
def test_medusa_heads_are_lossless(family: str, vocabulary: str) -> None:
    backbone = tiny_backbone(family)
    heads = medusa_drafter(backbone, vocabulary)
    steps = generate(backbone, heads, SPARSE, PROMPT, max_new_tokens=60, stop_ids=())
    assert tokens_of(steps) == plain(backbone, 60)


@pytest.mark.parametrize("limit", [1, 2, 17, 30])
def test_max_new_tokens_is_exact(limit: int) -> None:
    backbone = tiny_backbone()
    expected = plain(backbone, limit)
    oracle = Oracle(plain(backbone, 60), 1.0)
    steps = generate(backbone, oracle, TREES["dense"], PROMPT, max_new_tokens=limit, stop_ids=())
    assert tokens_of(steps) == expected and len(expected) == limit


def test_a_stop_token_inside_an_accepted_run_ends_the_answer() -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    stop = whole[10]
    expected = whole[: whole.index(stop) + 1]
    oracle = Oracle(whole, 1.0)
    steps = generate(backbone, oracle, TREES["chain"], PROMPT, max_new_tokens=60, stop_ids=(stop,))
    assert tokens_of(steps) == expected


@pytest.mark.parametrize("loop", ["alone", "batch"])
@pytest.mark.parametrize("reason", ["stop token", "token limit"])
def test_drafts_after_the_end_count_as_not_accepted(loop: str, reason: str) -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    # The first token comes with the prompt, then five a step: what is new at these places ends an answer among drafts.
    stop = next(t for i, t in enumerate(whole) if i > 5 and i % 5 in (2, 3) and t not in whole[:i])
    limits = {"max_new_tokens": 60, "stop_ids": (stop,)}
    if reason == "token limit":
        limits = {"max_new_tokens": 13, "stop_ids": ()}
    oracle, chain = Oracle(whole, 1.0), TREES["chain"]
    if loop == "batch":
        steps = [step for _, step in generate_batch(backbone, oracle, chain, [PROMPT], batch_size=1, **limits)]
    else:
        steps = list(generate(backbone, oracle, chain, PROMPT, **limits))
    assert 1 < len(steps[-1].tokens) <= chain.max_depth  # the answer ended among the drafts
    verified = steps[1:]
    assert [step.accepted for step in verified] == [len(step.tokens) - 1 for step in verified]
    emitted = sum(len(step.tokens) for step in verified)
    assert Stats.of(steps).acceptance_rate == pytest.approx(emitted / len(verified))


def test_the_models_end_token_is_the_default_stop() -> None:
    assert END_ID in tiny_backbone().eos_ids


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it() -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    text = backbone.decode(whole[6:8])
    for loop in ("plain", "drafted"):
        rules = {"max_new_tokens": 60, "stop_ids": (), "stop_strings": [text]}
        steps = (
            generate_plain(backbone, PROMPT, **rules)
            if loop == "plain"
            else generate(backbone, Oracle(whole, 1.0), TREES["dense"], PROMPT, **rules)
        )
        tokens = tokens_of(steps)
        assert tokens == whole[: len(tokens)] and len(tokens) <= 8
        assert text in backbone.decode(tokens) and text not in backbone.decode(tokens[:-1])


def test_a_stop_string_whose_characters_take_several_tokens_each_is_met() -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)

    class Bytes:
        """A tokenizer whose tokens are single bytes, of one string again and again."""

        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(text[id % len(text)] for id in ids).decode(errors="replace")

    text, stop = "\u9f98\u9f98\u0e2a\u0e27".encode(), "\u9f98\u9f98\u0e2a\u0e27" * 3
    ending = StopCriteria(backbone, Request(PROMPT, 60, stop_ids=(), stop_strings=[stop]))
    ending._tokenizer = Bytes()
    assert len(ending.truncate(list(range(len(whole))))) == len(stop.encode()) and ending.reason == "stop"


def test_a_stop_string_may_be_a_special_token_which_is_never_shown() -> None:
    backbone = tiny_backbone()
    whole = plain(backbone, 60)
    marked = whole[6]
    # Whatever the seventh token is, it is special now: `decode` leaves it out.
    name = backbone.tokenizer.convert_ids_to_tokens(marked)
    backbone.tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    assert backbone.decode([marked]) == ""
    rules = {"max_new_tokens": 60, "stop_ids": (), "stop_strings": [name]}
    tokens = tokens_of(generate_plain(backbone, PROMPT, **rules))
    assert tokens == whole[: whole.index(marked) + 1]


@pytest.mark.parametrize("shape", TREES)
def test_the_context_limit_ends_the_answer_without_leaving_it(shape: str) -> None:
    backbone = tiny_backbone(positions=32)
    seen: list[int] = []
    inner = backbone.model.base_model.forward

    def spy(*args, **kwargs):
        seen.append(int(kwargs["position_ids"].max()))
        return inner(*args, **kwargs)

    backbone.model.base_model.forward = spy
    expected = plain(backbone, 100)
    assert len(expected) == 32 - len(PROMPT)
    steps = generate(backbone, Oracle(expected, 0.6), TREES[shape], PROMPT, max_new_tokens=100, stop_ids=())
    assert tokens_of(steps) == expected
    assert max(seen) < 32


@pytest.mark.parametrize("drafted", [False, True])
def test_a_generous_token_limit_makes_no_cache_beyond_what_the_context_needs(
    drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(positions=300)
    caches: list[Cache] = []
    inner = backbone.engine.new_cache
    monkeypatch.setattr(
        backbone.engine, "new_cache", lambda *given, **how: caches.append(inner(*given, **how)) or caches[-1]
    )
    rules = {"max_new_tokens": 1_000_000, "stop_ids": ()}
    if drafted:
        steps = generate(backbone, medusa_drafter(backbone), SPARSE, PROMPT, **rules)
    else:
        steps = generate_plain(backbone, PROMPT, **rules)
    assert len(tokens_of(steps)) == 300 - len(PROMPT)
    # Capacities double: no more than twice what the longest text and a tree need.
    assert len(caches) == 1 and 300 <= caches[0].capacity < 2 * (300 + SPARSE.size)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    backbone = tiny_backbone(positions=32)
    with pytest.raises(UserError, match="the prompt has 40 tokens"):
        next(generate_plain(backbone, [5] * 40, max_new_tokens=5))
    with pytest.raises(UsageError, match="max_new_tokens 0"):
        next(generate_plain(backbone, PROMPT, max_new_tokens=0))
    with pytest.raises(UserError, match="empty"):
        next(generate_plain(backbone, [], max_new_tokens=5))


def test_one_backbone_pass_a_step() -> None:
    backbone = tiny_backbone()
    calls = []
    inner = backbone.model.base_model.forward
    backbone.model.base_model.forward = lambda *a, **k: calls.append(1) or inner(*a, **k)
    steps = list(generate(backbone, medusa_drafter(backbone), SPARSE, PROMPT, max_new_tokens=40, stop_ids=()))
    assert len(calls) == len(steps)


def test_exact_sampling_is_reproducible_and_typical_accepts_more() -> None:
    backbone = tiny_backbone()
    heads = medusa_drafter(backbone)

    def run(rule: Sampling) -> list[int]:
        steps = generate(backbone, heads, SPARSE, PROMPT, max_new_tokens=40, sampling=rule, stop_ids=())
        return tokens_of(steps)

    exact = Sampling("exact", 1.0, seed=3)
    assert run(exact) == run(exact)
    assert run(exact) != run(Sampling("exact", 1.0, seed=4))
    assert run(Sampling("typical", 0.0)) == plain(backbone, 40)
    loose = Sampling("typical", 2.0, epsilon=1e-6, delta=1e-6)
    stats = Stats.of(generate(backbone, heads, SPARSE, PROMPT, max_new_tokens=40, sampling=loose, stop_ids=()))
    assert stats.acceptance_rate > 3


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.8}, {"top_k": 6}], ids=["whole", "nucleus", "top-k"])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_sampling_with_a_seed_gives_what_plain_sampling_with_it_gives(right: float, cuts: dict) -> None:
    """Each token is drawn by a random number of its own, so that the drafts change nothing at all."""
    backbone = tiny_backbone("qwen3")
    rule = Sampling("exact", 1.2, seed=5, **cuts)
    expected = plain(backbone, 60, sampling=rule)
    assert len(set(expected)) > 10
    steps = list(
        generate(backbone, Oracle(expected, right), SPARSE, PROMPT, max_new_tokens=60, stop_ids=(), sampling=rule)
    )
    assert tokens_of(steps) == expected
    assert Stats.of(steps).acceptance_rate > 3 if right == 1.0 else True
