"""Keys and values in fp16 and q8_0 (`--kv`): their numbers, their bits in every pass, their memory, and refusals."""

from typing import Any

import numpy as np
import pytest
import torch

from medusa_cli.decode import Request
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.native import instructions, is_available, library
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import Tree
from tests.helpers import (
    PROMPT,
    Oracle,
    attach,
    decoder_of,
    forward,
    generate,
    generate_batch,
    generate_plain,
    medusa_drafter,
    steps_of,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)
from tests.models import tiny_network
from tests.test_native import TREE, assert_same_bits, text_of
from tests.test_prefix_cache import make

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="the native library is not compiled"),
    pytest.mark.usefixtures("restored"),
]
EACH_TYPE = pytest.mark.parametrize("kv", ["fp16", "q8_0"])


def backbone_of(
    kv: str, family: str = "llama", quantize: str | None = None, **shape: Any
) -> Backbone:
    shape = {"hidden": 64, "vocab": 256, "positions": 1024, **shape}
    network = tiny_model(family, **shape).to(torch.bfloat16)
    backbone = Backbone(network, tiny_tokenizer(shape["vocab"]))
    attach(backbone, "native", quantize=quantize, kv=kv)
    return backbone


def rounded(rows: Any, kv: str) -> Any:
    """Returns rows [.., D] in another type, each row by itself, as fp32."""
    if kv == "fp16":
        return rows.clip(-65504, 65504).astype(np.float16).astype(np.float32)
    padded = np.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, -rows.shape[-1] % 32)])
    groups = padded.reshape(*padded.shape[:-1], -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    scale = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        numbers = np.where(scale > 0, np.rint(groups / scale).clip(-127, 127), 0)
    return (numbers * scale).reshape(padded.shape)[..., : rows.shape[-1]]


@pytest.mark.quick("16-q8_0")
@EACH_TYPE
@pytest.mark.parametrize("dim", [12, 16, 32, 80])
def test_rows_are_rounded_each_by_itself(kv: str, dim: int) -> None:
    caches = []
    for each in ("fp32", kv):
        network = tiny_network("qwen3", head_dim=dim, hidden_size=64)
        backbone = Backbone(network, tiny_tokenizer(128))
        attach(backbone, "native", kv=each)
        caches.append(backbone.engine.new_cache(2))
        # Another slot's text changes nothing.
        forward(backbone, text_of(9, 128).flip(0), caches[-1], slot=0)
        forward(backbone, text_of(40, 128), caches[-1], slot=1)
    # Of the first layer, whose inputs are the same.
    exact, kept = (torch.stack(cache.rows_of(0, 1, 40)).numpy() for cache in caches)
    assert kept.shape[-1] == dim
    assert np.array_equal(kept, rounded(exact, kv))


@EACH_TYPE
def test_numbers_beyond_those_of_the_type_stay_finite(kv: str) -> None:
    backbone = backbone_of(kv)
    for name, weight in backbone.model.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            weight.data *= 1e7
    attach(backbone, "native", kv=kv)
    cache = backbone.engine.new_cache(1, 1)
    assert torch.isfinite(forward(backbone, text_of(40), cache).logits).all()
    nodes = torch.full((TREE.size,), 7)
    assert torch.isfinite(forward(backbone, nodes, cache, TREE).logits).all()


@pytest.mark.quick("fp16-mistral-window-None")
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
@EACH_TYPE
def test_rows_have_the_same_bits_in_prompts_trees_and_one_by_one(
    kv: str, family: str, quantize: str | None
) -> None:
    backbone = backbone_of(kv, family, quantize)
    assert backbone.engine.row_invariant
    assert kv in backbone.engine.title
    assert_same_bits(backbone, text_of(600), (1, 5, 16, 31, 32, 77, 255, 257, 511, 590))


@pytest.mark.quick("fp16-qwen3_5_text")
@pytest.mark.parametrize("variant", ["gemma2", "gpt_oss", "gemma4_text", "phi", "qwen3_5_text"])
@EACH_TYPE
def test_variants_have_the_same_bits_and_nearly_the_same_logits(kv: str, variant: str) -> None:
    backbone, text = Backbone(tiny_network(variant), tiny_tokenizer(128)), text_of(90, 128)
    attach(backbone, "native")
    exact = forward(backbone, text).logits.clone()
    attach(backbone, "native", kv=kv)
    # A few rows may go to other experts.
    away = (forward(backbone, text).logits - exact).abs().median()
    assert 0 < away < {"fp16": 1e-3, "q8_0": 0.02}[kv] * exact.abs().max()
    if not backbone.engine.new_cache().stateful:
        assert_same_bits(backbone, text, (1, 16, 33, 70))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "cohere"])
def test_biases_of_keys_that_hardly_turn_take_no_bits_from_the_rest(kind: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    network = tiny_network(kind, rope_parameters=rope, attention_bias=True, use_qk_norm=False)
    backbone, text, away = Backbone(network, tiny_tokenizer(128)), text_of(90, 128), []
    slow = {"qwen2": (6, 7, 14, 15), "cohere": (12, 13, 14, 15)}[kind]
    for size in (0.0, 200.0):
        with torch.no_grad():
            for layer in network.model.layers:
                layer.self_attn.k_proj.bias.unflatten(0, (-1, 16))[:, slow] = size
        attach(backbone, "native")
        exact = forward(backbone, text).logits.clone()
        attach(backbone, "native", kv="q8_0")
        away.append((forward(backbone, text).logits - exact).abs().median())
        assert_same_bits(backbone, text, (1, 16, 33, 70))
    assert away[1] < 2 * away[0]


@EACH_TYPE
def test_any_number_of_threads_and_every_instruction_set_gives_the_same_bits(kv: str) -> None:
    backbone, text, passes = backbone_of(kv, "gemma3"), text_of(150), []
    for name in instructions():
        library().use(name.encode())
        for count in (1, 2, 3):
            library().threads(count)
            passes.append(forward(backbone, text).logits.clone())
    assert all(torch.equal(logits, passes[0]) for logits in passes)


@pytest.mark.quick("q8_0")
@EACH_TYPE
def test_greedy_output_over_drafts_is_plain_decodings(kv: str) -> None:
    backbone = backbone_of(kv, quantize="int8", layers=4)
    rules: dict[str, Any] = {"max_new_tokens": 150, "stop_ids": ()}
    expected = tokens_of(generate_plain(backbone, PROMPT, **rules))
    for tree in (Tree.dense([3, 2, 2, 1]), Tree.dense([8, 6])):
        steps = list(generate(backbone, Oracle(expected, 0.6), tree, PROMPT, **rules))
        assert tokens_of(steps) == expected
        assert len(steps) < 120
    prompts = [PROMPT, list(range(5, 200)), [8]]
    drafter = medusa_drafter(backbone)
    together = generate_batch(backbone, drafter, TREE, prompts, batch_size=2, **rules)
    for prompt, steps in zip(prompts, together, strict=True):
        assert tokens_of(steps) == tokens_of(generate_plain(backbone, prompt, **rules))


@EACH_TYPE
def test_slots_keep_swap_grow_and_copy_their_rows(kv: str) -> None:
    backbone, text = backbone_of(kv), text_of(80)
    whole = forward(backbone, text).logits.clone()
    cache = backbone.engine.new_cache(3, 1)
    forward(backbone, text[:30], cache, slot=2, logits="none")
    nodes = torch.full((TREE.size,), 7)
    nodes[[0, 3, 5, 8]] = text[30:34]
    forward(backbone, nodes, cache, TREE, slot=2)
    cache.keep(2, [0, 3, 5, 8])
    cache.swap(0, 2)
    cache.reserve(cache.capacity + 1)
    assert torch.equal(forward(backbone, text[34:], cache, slot=0).logits, whole[34:])
    cache.fill(1, 0, 48, cache.rows(0, 0, 48))
    assert torch.equal(forward(backbone, text[48:], cache, slot=1).logits, whole[48:])
    cache.truncate(1, 17)
    assert torch.equal(forward(backbone, text[17:], cache, slot=1).logits, whole[17:])


@pytest.mark.quick("None-fp16")
@EACH_TYPE
@pytest.mark.parametrize("kind", [None, "medusa", "eagle-draft"])
def test_a_later_turn_is_answered_as_without_the_cached_prefix(kv: str, kind: str | None) -> None:
    backbone = tiny_backbone(layers=6)
    attach(backbone, "native", kv=kv)
    rules: dict[str, Any] = {"max_new_tokens": 17, "stop_ids": ()}
    decoder = decoder_of(backbone, make(backbone, kind), Tree.dense([2, 2]))
    prompt = [5, 9, 20, 11, 7, 31, 8, 44, 10, 12]
    for _ in range(2):
        [steps] = steps_of(decoder, [Request(prompt, **rules)])
        answer = tokens_of(steps)
        assert answer == tokens_of(generate_plain(backbone, prompt, **rules))
        prompt = [*prompt, *answer, 6, 7]


def test_memory_is_that_of_the_type() -> None:
    sizes = {}
    for kv in ("fp32", "fp16", "q8_0"):
        backbone = backbone_of(kv, hidden=128)
        cache = backbone.engine.new_cache(2, 32)
        assert cache.nbytes == 2 * 32 * backbone.engine.row_bytes
        sizes[kv] = backbone.engine.row_bytes
    assert sizes["fp16"] == sizes["fp32"] / 2
    assert sizes["q8_0"] == sizes["fp32"] * 34 / 128


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "eager"},
        {"engine": "torch"},
        {"quantize": "bnb.int8"},
    ],
)
def test_only_the_native_engine_has_them(options: dict[str, Any], model: str) -> None:
    with pytest.raises(UsageError, match="kv q8_0"):
        load_backbone(model, LoadOptions(kv="q8_0", **options))
