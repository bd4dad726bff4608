"""Short convolutions and gated delta nets in the native step: their bits, slots, and transformers' own tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.decode import Request
from medusa_cli.drafters import Firp
from medusa_cli.engine import Plan, load_backbone
from medusa_cli.engine.state_cache import SNAPSHOTS
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.native import instructions, is_available, library
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.helpers import (
    SPARSE,
    answer,
    attach,
    decoder_of,
    forward,
    save_network,
    steps_of,
    tiny_tokenizer,
    tokens_of,
)
from tests.models import CHAIN, Known, tiny_network
from tests.test_native import KINDS, PATH, TREE, assert_same_bits

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="the native library is not compiled"),
    pytest.mark.usefixtures("restored"),
]

MODELS = ("lfm2", "qwen3_5_text")
EACH_MODEL = pytest.mark.parametrize("model", MODELS)
TOKENS = torch.randint(5, 128, (200,), generator=torch.Generator().manual_seed(1))
# What columns a thread takes of a head depends on its width.
WIDE = {"qwen3_5_text": {"linear_value_head_dim": 64, "linear_key_head_dim": 32}, "lfm2": {}}


def backbone_of(model: str, kind: str = "fp32", **own: Any) -> Backbone:
    dtype, quantize, rows = KINDS[kind]
    network = tiny_network(model, **own).to(dtype)
    backbone = Backbone(network, tiny_tokenizer(128))
    attach(backbone, "native", quantize=quantize, rows=rows)
    return backbone


@pytest.mark.quick
@EACH_MODEL
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_rows_have_the_same_bits_in_prompts_trees_and_one_by_one(model: str, kind: str) -> None:
    backbone = backbone_of(model, kind, **WIDE[model])
    assert backbone.engine.row_invariant
    assert_same_bits(backbone, TOKENS, (1, 6, 16, 31, 40, 77, 130, 190))


@EACH_MODEL
def test_a_batch_of_slots_has_the_bits_of_each_alone(model: str) -> None:
    backbone = backbone_of(model)
    logits = forward(backbone, TOKENS).logits.clone()
    lengths = (50, 0, 90)
    cache = backbone.engine.new_cache(4, 1)
    for slot, length in enumerate(lengths):
        if length:
            forward(backbone, TOKENS[:length], cache, slot=slot + 1, logits="none")
    # The empty slot's states are another text's.
    forward(backbone, TOKENS[100:120], cache, slot=2, logits="none")
    cache.truncate(2, 0)
    nodes = torch.full((3, TREE.size), 7)
    for row, length in enumerate(lengths):
        nodes[row, PATH] = TOKENS[length : length + len(PATH)]
    out = backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, first=1), cache)
    verified = out.logits.clone()
    for row, length in enumerate(lengths):
        for depth, node in enumerate(PATH):
            assert torch.equal(verified[row, node], logits[length + depth])
    # Slots move, and chains of all of them go on at once, behind as much as each has kept.
    for row in range(3):
        cache.keep(row + 1, PATH[: row + 2])
    cache.swap(1, 3)
    ends = [length + row + 2 for row, length in enumerate(lengths)][::-1]
    tails = torch.stack([TOKENS[end : end + 3] for end in ends])
    out = backbone.engine.forward(Plan(tails, None, None, first=1, logits="all"), cache)
    for row, end in enumerate(ends):
        assert torch.equal(out.logits[row], logits[end : end + 3])


@EACH_MODEL
def test_any_number_of_threads_and_every_instruction_set_gives_the_same_bits(model: str) -> None:
    backbone = backbone_of(model, "bf16", **WIDE[model])
    passes = []
    for name in instructions():
        library().use(name.encode())
        for count in (1, 2, 3):
            library().threads(count)
            cache = backbone.engine.new_cache()
            forward(backbone, TOKENS[:40], cache, logits="none")
            forward(backbone, TOKENS[40 : 40 + TREE.size], cache, TREE)
            cache.keep(0, PATH)
            passes.append(forward(backbone, TOKENS[60:70], cache).logits.clone())
    assert all(torch.equal(logits, passes[0]) for logits in passes)


def test_a_convolutions_slot_is_cut_back_to_any_length() -> None:
    backbone = backbone_of("lfm2")
    logits = forward(backbone, TOKENS).logits.clone()
    cache = backbone.engine.new_cache()
    forward(backbone, TOKENS, cache, logits="none")
    for length in (150, 43, 2, 1):
        assert cache.reusable(0, length) == length
        cache.truncate(0, length)
        out = forward(backbone, TOKENS[length : length + 4], cache)
        assert torch.equal(out.logits, logits[length : length + 4]), length


def test_a_delta_nets_slot_goes_back_to_where_a_prompt_ended() -> None:
    backbone = backbone_of("qwen3_5_text")
    logits = forward(backbone, TOKENS).logits.clone()
    cache = backbone.engine.new_cache()
    for first, end in ((0, 30), (30, 60), (60, 90)):
        forward(backbone, TOKENS[first:end], cache, logits="none")
    assert [cache.reusable(0, rows) for rows in (29, 30, 89, 90)] == [0, 30, 60, 90]
    forward(backbone, TOKENS[90 : 90 + TREE.size], cache, TREE)  # nothing of it is kept
    assert torch.equal(forward(backbone, TOKENS[90:94], cache).logits, logits[90:94])
    cache.truncate(0, 60)
    assert torch.equal(forward(backbone, TOKENS[60:64], cache).logits, logits[60:64])
    with pytest.raises(ValueError, match="slot 0"):
        cache.truncate(0, 10)
    assert cache.nbytes > SNAPSHOTS * cache.slot_bytes // 2 > 0


@EACH_MODEL
def test_states_grow_with_the_cache_and_are_counted(model: str) -> None:
    backbone = backbone_of(model)
    cache = backbone.engine.new_cache(2, 1)
    forward(backbone, TOKENS[:20], cache, slot=1)
    capacity = cache.capacity
    cache.reserve(4 * capacity)
    rows = 2 * backbone.engine.row_bytes * (cache.capacity - capacity)
    assert cache.nbytes >= rows
    logits = forward(backbone, TOKENS[:25]).logits[20:].clone()
    assert torch.equal(forward(backbone, TOKENS[20:25], cache, slot=1).logits, logits)


@EACH_MODEL
def test_extra_rows_are_refused(model: str, tmp_path: Path) -> None:
    backbone = load_backbone(save_network(tiny_network(model), tmp_path), LoadOptions(dtype="fp32"))
    assert backbone.engine.name == "native"
    drafter = Firp.create(backbone, 2, vocabulary="shared")
    with pytest.raises(UserError, match="firp"):
        list(answer(decoder_of(backbone, drafter, SPARSE.truncate(2)), [5, 9], max_new_tokens=3))


@pytest.mark.slow
@EACH_MODEL
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_two_hundred_answers_are_transformers_own(model: str, engine: str) -> None:
    count = 24
    network = tiny_network(model)
    backbone = Backbone(tiny_network(model))
    attach(backbone, engine)
    if engine == "eager":
        backbone.engine.check()
    chance = torch.Generator().manual_seed(2)
    three = Tree.from_choices([[0], [1], [0, 0]])
    rules = {"max_new_tokens": count, "stop_ids": ()}
    reused = 0
    for number in range(50):
        prompt = torch.randint(5, 128, (4 + number % 30,), generator=chance).tolist()
        texts = []
        # A second turn goes on from the first one's answer.
        for more in ([], [9, 30, 31]):
            prompt = [*(texts[-1] if texts else prompt), *more]
            ids = torch.tensor([prompt])
            own = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            texts.append(own[0].tolist())
        right = (1.0, 0.6, 0.0)[number % 3]
        for tree in (CHAIN.truncate(3), three):
            decoder = decoder_of(backbone, Known(texts, right), tree)
            for text in texts:
                sequence, step = decoder.admit(Request(text[:-count], **rules))
                tokens = list(step.tokens)
                while not sequence.done:
                    tokens += tokens_of(step for _, step in decoder.step())
                assert tokens == text[-count:]
                reused += sequence.reused
    assert reused


@EACH_MODEL
def test_sequences_of_a_batch_decode_as_alone(model: str) -> None:
    backbone = backbone_of(model, "int8")
    rules = {"max_new_tokens": 20, "stop_ids": ()}
    prompts = [TOKENS[:7].tolist(), TOKENS[20:60].tolist(), TOKENS[70:72].tolist()]
    alone = [tokens_of(answer(decoder_of(backbone), prompt, **rules)) for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, alone, strict=True)]
    decoder = decoder_of(backbone, Known(texts, 0.6), SPARSE, slots=2)
    steps = steps_of(decoder, [Request(prompt, **rules) for prompt in prompts])
    assert [tokens_of(of_request) for of_request in steps] == alone


@pytest.mark.quick("llama-native", "qwen3_5_text-eager")
@pytest.mark.parametrize("engine", ["native", "eager"])
@pytest.mark.parametrize("model", [*MODELS, "qwen3_5_moe_text", "llama"])
def test_memory_is_reckoned_as_it_is_allocated(model: str, engine: str, tmp_path: Path) -> None:
    path = save_network(tiny_network(model), tmp_path)
    backbone = load_backbone(path, LoadOptions(dtype="fp32", engine=engine))
    slots = 3
    cache = backbone.engine.new_cache(slots, 256)
    cache.reserve(256)
    for slot in range(slots):
        for first in range(0, 12 * (SNAPSHOTS + 1), 12):
            forward(backbone, TOKENS[first : first + 12], cache, slot=slot, logits="none")
    nodes = torch.full((slots, TREE.size), 7)
    backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask), cache)
    rows = slots * cache.capacity * backbone.engine.row_bytes
    fixed = slots * backbone.engine.slot_bytes(TREE.size)
    assert cache.nbytes == rows + fixed
    assert (fixed > 0) == (model != "llama" and (model, engine) != ("lfm2", "native"))
    held = cache.held_bytes(0)
    assert 0 <= held <= backbone.engine.slot_bytes(0)


@pytest.mark.parametrize("missing", [0, 1])
def test_running_states_count_against_the_memory(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of("qwen3_5_text")
    decoder = decoder_of(backbone, None, slots=4)
    fixed = backbone.engine.slot_bytes(decoder.policy.size)
    assert fixed > 0
    rows = decoder.cache.missing_rows({0: decoder._rows(6)}) * backbone.engine.row_bytes
    free = rows + fixed - missing
    monkeypatch.setattr("medusa_cli.decode.decoder.free_memory", lambda device: free)
    if missing:
        with pytest.raises(UserError, match="max_new_tokens"):
            decoder.admit(Request([5, 9], max_new_tokens=4, stop_ids=()))
    else:
        decoder.admit(Request([5, 9], max_new_tokens=4, stop_ids=()))
