"""What every way of running a step owes: the ordinary loop's tokens, step by step, for answers that come in turns."""

import itertools

import pytest
import torch

from medusa_cli.decode import Decoder, Request
from medusa_cli.drafters import HydraHeads
from medusa_cli.engine import attach
from medusa_cli.model import Backbone
from tests.helpers import (
    FAMILIES,
    PROMPT,
    SPARSE,
    Oracle,
    answer,
    forward,
    generate,
    generate_plain,
    plain,
    prefilled,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
)


def tokens_of(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


def with_state(backbone: Backbone) -> HydraHeads:
    torch.manual_seed(1)
    heads = HydraHeads.create(backbone, 4, 2, "own", prefix_layers=1)
    for weight in heads.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return heads.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_engine_and_a_drafter_with_state_are_lossless(family: str) -> None:
    fast, eager = tiny_backbone(family, engine="fast"), tiny_backbone(family)
    steps = generate(fast, with_state(fast), SPARSE, PROMPT, max_new_tokens=60, stop_ids=())
    assert tokens_of(steps) == plain(eager, 60)


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_what_a_step_settles_is_what_a_pass_by_itself_gives(engine: str) -> None:
    backbone = tiny_backbone("qwen3", engine=engine)
    cache, decoder = prefilled(backbone, PROMPT), Decoder(backbone, Oracle(plain(backbone, 60), 0.8), SPARSE)
    sequence, _ = decoder.admit(Request(PROMPT, max_new_tokens=40, stop_ids=()))
    accepted = 0
    while decoder.sequences:
        root, before = sequence.pending.root, len(sequence.tokens)
        [(_, step)] = decoder.step()
        path = [root, *step.tokens[:-1]]
        out = forward(backbone, path, cache)
        assert out.logits.argmax(-1).tolist() == step.tokens  # the backbone's own choice after each
        if decoder.sequences:
            settled = sequence.pending
            assert sequence.tokens[before:] == settled.tokens.tolist() == path and settled.start == before
            assert torch.allclose(settled.hidden, out.hidden, atol=1e-4) and settled.root == step.tokens[-1]
        accepted += step.accepted
    assert accepted > 10


@pytest.mark.parametrize("engine", ["eager", "fast"])
def test_answers_that_come_in_turns_do_not_disturb_one_another(engine: str) -> None:
    """Engines and drafters are shared, with whatever buffers they keep; caches and states are not."""
    backbone = tiny_backbone(engine=engine)
    heads, rules = with_state(backbone), {"max_new_tokens": 20, "stop_ids": ()}
    one = generate(backbone, heads, SPARSE, PROMPT, **rules)
    other = generate(backbone, heads, SPARSE, PROMPT[::-1], **rules)
    found: list[list[int]] = [[], []]
    for steps in itertools.zip_longest(one, other):
        for tokens, step in zip(found, steps, strict=True):
            tokens += step.tokens if step is not None else []
    assert found[0] == plain(backbone, 20)
    assert found[1] == tokens_of(generate_plain(backbone, PROMPT[::-1], **rules))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpus_fast_engine_gives_what_its_eager_one_gives(family: str) -> None:
    eager, fast = (Backbone(tiny_model(family).cuda(), tiny_tokenizer()) for _ in range(2))
    attach(eager)
    attach(fast, "fast")
    expected = plain(eager, 60)
    assert plain(fast, 60) == expected
    decoder = Decoder(fast, with_state(fast).cuda(), SPARSE)
    for _ in range(2):  # the second finds the first's text in the slot
        assert tokens_of(answer(decoder, PROMPT, max_new_tokens=60, stop_ids=())) == expected
