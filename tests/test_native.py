"""The native library: its matrices, its passes bit for bit, packed files, instruction sets, threads and processes."""

import copy
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from medusa_cli.bench.digest import PUBLISHED
from medusa_cli.engine import Plan, load_backbone, twin
from medusa_cli.engine.linear import packed_linear
from medusa_cli.engine.native_engine import NativeEngine
from medusa_cli.engine.native_model import NativeModel
from medusa_cli.engine.packed import bytes_of, pack_in_memory
from medusa_cli.engine.probes import rotary_of
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.paths import home
from medusa_cli.model import Backbone
from medusa_cli.model.weights import NetworkWeights
from medusa_cli.native import (
    Format,
    PackedMatrix,
    RawMatrix,
    instruction_set,
    instructions,
    is_available,
    library,
    why_unavailable,
)
from medusa_cli.native.build import compile_selftest, compiler
from medusa_cli.native.library import LIBRARY, Step
from medusa_cli.native.matrix import SCALE_PLACES
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.tree import DynamicTree, Tree
from tests.helpers import (
    FAMILIES,
    PROMPT,
    Oracle,
    attach,
    forward,
    generate,
    generate_batch,
    generate_plain,
    medusa,
    medusa_drafter,
    medusa_json,
    plain,
    python,
    rows_of,
    save_model,
    save_network,
    tiny_backbone,
    tiny_model,
    tiny_tokenizer,
    tokens_of,
)
from tests.models import tiny_network
from tests.refusing import refusing_library

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="the native library is not compiled"),
    pytest.mark.usefixtures("restored"),
]

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# Types with layers unlike Llama's: factors, joined matrices, norms elsewhere and of other kinds, attention beside the
# MLP, rotary positions of neighbors or in some layers only, soft caps, sinks, experts chosen in several ways, heads of
# different widths, shared keys and embeddings by layer, clamped gates, xIELU, norms without a gain, before the first
# layer and before the last matrices, and sparsemixer.
VARIANTS = (
    "granite", "phi", "phi3", "stablelm", "nemotron", "smollm3", "olmo2", "glm4", "cohere2", "hunyuan_v1_dense",
    "gemma2", "granite_swa", "qwen2_moe", "mixtral", "exaone_moe", "cohere2_moe", "granitemoeshared", "gemma4_text",
    "gemma4_unified_text", "gpt_oss", "apertus", "olmo", "nanochat", "bitnet", "phimoe",
)  # fmt: skip
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
EACH_FORMAT = pytest.mark.parametrize("format", Format, ids=lambda format: format.name)
# Where the scales of a block stand, of the formats that have them in fp16.
# A path 0, 3, 5, 8 among siblings, so that its rows do not stand side by side.
TREE = Tree((-1, 0, 0, 0, 2, 3, 3, 5, 5, 8), (0, 0, 1, 2, 0, 0, 1, 0, 1, 0))
PATH = [0, 3, 5, 8]
# Weights, and the rows that they are multiplied by.
KINDS = {
    "fp32": (torch.float32, None, "fp32"),
    "fp16": (torch.float16, None, "fp32"),
    "bf16": (torch.bfloat16, None, "fp32"),
    "int8": (torch.bfloat16, "int8", "int8"),
    "int8-fp32": (torch.bfloat16, "int8", "fp32"),
    "int4": (torch.bfloat16, "int4", "int8"),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def random_matrix(format: Format, outputs: int, inputs: int) -> RawMatrix:
    """Returns a matrix of random bits in a format; scales are small."""
    chance = np.random.default_rng(0)
    values = chance.standard_normal((outputs, inputs)).astype(np.float32)
    if format == Format.F32:
        return RawMatrix.of(values)
    if format == Format.F16:
        return RawMatrix.of(values.astype(np.float16))
    if format == Format.BF16:
        return RawMatrix.of((values.view(np.uint32) >> 16).astype(np.uint16))
    rows = chance.integers(0, 256, (outputs, format.row_bytes(inputs)), dtype=np.uint8)
    blocks = rows.reshape(outputs, -1, format.file_bytes)
    for place in SCALE_PLACES.get(format, ()):
        scales = (chance.random((*blocks.shape[:2], 1)) * 0.01 + 0.001).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    if format == Format.MXFP4:
        blocks[:, :, 0] = chance.integers(118, 126, blocks.shape[:2])
    return RawMatrix(format, rows, inputs)


def random_rows(count: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, inputs)).astype(np.float32)


def row_kinds(format: Format) -> tuple[bool, ...]:
    """Returns the values of int8_rows that make a difference."""
    return (False,) if format.is_float else (False, True)


def error_of(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


# ---- matrices


@pytest.mark.parametrize("format", SCALE_PLACES)
def test_scales_that_are_not_finite_are_seen(format: Format) -> None:
    for place in SCALE_PLACES[format]:
        for number in (np.nan, -np.inf):
            raw = random_matrix(format, 4, 512)
            assert raw.is_finite
            block = raw.rows.reshape(-1, format.file_bytes)[-1]
            block[place : place + 2] = np.array([number], np.float16).view(np.uint8)
            assert not raw.is_finite
            assert not np.isfinite(raw.floats()).all()


@EACH_FORMAT
@pytest.mark.parametrize("outputs", [1, 16, 100])
def test_a_packed_matrix_holds_the_numbers_that_gguf_reads(format: Format, outputs: int) -> None:
    raw = random_matrix(format, outputs, 768)
    expected = raw.floats()
    if not format.is_float:
        assert np.array_equal(
            expected, gguf.dequantize(raw.rows, gguf.GGMLQuantizationType[format.name])
        )
    packed = PackedMatrix.pack(raw)
    assert np.array_equal(packed.embed(np.arange(outputs)), expected)
    assert np.array_equal(
        packed.embed(np.array([outputs - 1, 0]), 2.0), 2 * expected[[outputs - 1, 0]]
    )


@EACH_FORMAT
def test_a_product_is_that_of_its_numbers_and_of_the_same_bits_with_all_instructions(
    format: Format,
) -> None:
    inputs = 768 if 800 % format.block else 800
    raw, x = random_matrix(format, 100, inputs), random_rows(45, inputs)
    bias = random_rows(1, 100)[0]
    expected = x.astype(np.float64) @ raw.floats().astype(np.float64).T + bias
    for int8_rows in row_kinds(format):
        products = []
        for name in instructions():
            assert library().use(name.encode()) == 0
            products.append(PackedMatrix.pack(raw, bias, int8_rows).multiply(x))
        assert error_of(products[0], expected) < (1e-2 if int8_rows else 1e-5)
        for name, product in zip(instructions(), products, strict=True):
            assert np.array_equal(product, products[0]), name


@EACH_FORMAT
def test_rows_near_zero_have_finite_products_of_the_same_bits(format: Format) -> None:
    raw, x = random_matrix(format, 40, 256), random_rows(2, 256)
    x[0] = 1e-38
    for int8_rows in row_kinds(format):
        products = []
        for name in instructions():
            assert library().use(name.encode()) == 0
            products.append(PackedMatrix.pack(raw, None, int8_rows).multiply(x))
            assert np.abs(products[-1][0]).max() < 1e-30, name
            assert np.isfinite(products[-1]).all(), name
            assert np.array_equal(products[-1], products[0]), name


def test_no_rows_have_an_empty_product() -> None:
    matrix = PackedMatrix.pack(random_matrix(Format.Q4_K, 40, 256))
    assert matrix.multiply(np.empty((0, 256), np.float32)).shape == (0, 40)


@pytest.mark.skipif(
    shutil.which("nm") is None or "MEDUSA_LIBRARY" in os.environ,
    reason="nm lists the functions of an optimized library",
)
def test_instruction_sets_share_no_code() -> None:
    """The linker keeps one of the functions of a name, perhaps one with instructions that this CPU lacks."""
    done = subprocess.run(
        ["nm", "-DC", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    functions = re.findall(r"^[0-9a-f]+ W (.*)$", done.stdout, re.MULTILINE)
    own = re.compile(r"medusa::(generic|avx2|avxvnni|avx512|avx512vnni|amx|neon)::")
    of_common_files = re.compile(r"operator (new|delete)|thread")
    assert any(own.search(name) for name in functions)
    assert not [
        name for name in functions if not own.search(name) and not of_common_files.search(name)
    ]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="it is compiled")
def test_all_instruction_sets_have_the_published_digest(tmp_path: Path) -> None:
    """The self-test compares them with plain C++; the digest is that of every machine and compiler."""
    program = tmp_path / "selftest"
    compile_selftest(program, Path(LIBRARY), ["-O1"])
    page = (Path(__file__).parent.parent / "docs/engines.md").read_text(encoding="utf-8")
    [digest] = re.findall(r"one digest,\s+`([0-9a-f]{16})`", page)
    # It is told another digest, and names each set with its own; sets that differ would be named besides.
    other = "0" * 16
    done = subprocess.run([program, other], capture_output=True, text=True)
    lines = [
        (f"{name} {digest}", f"{name}: the digest should be {other}") for name in instructions()
    ]
    assert done.stdout.splitlines() == [line for pair in lines for line in pair], done.stderr
    assert done.returncode == 1


def test_every_scale_of_mxfp4_is_exact_with_all_instructions() -> None:
    exponents = np.arange(253, dtype=np.uint8)  # the least scales are subnormal
    codes = np.arange(16, dtype=np.uint8)
    rows = np.concatenate([exponents[:, None], np.tile(codes | codes[::-1] << 4, (253, 1))], axis=1)
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    powers = np.ldexp(1.0, exponents.astype(int) - 128)
    expected = powers[:, None] * np.concatenate([doubled, doubled[::-1]])
    packed = PackedMatrix.pack(RawMatrix(Format.MXFP4, rows, 32))
    identity = np.eye(32, dtype=np.float32)
    for name in instructions():
        assert library().use(name.encode()) == 0
        assert np.array_equal(packed.embed(np.arange(253)), expected.astype(np.float32)), name
        assert np.array_equal(packed.multiply(identity), expected.T.astype(np.float32)), name
    assert np.array_equal(gguf.dequantize(rows, gguf.GGMLQuantizationType.MXFP4), expected)


@EACH_FORMAT
def test_a_row_of_a_product_has_the_same_bits_whatever_stands_beside_it(format: Format) -> None:
    raw, x = random_matrix(format, 40, 256), random_rows(70, 256)
    for name in instructions():
        library().use(name.encode())
        for int8_rows in row_kinds(format):
            matrix = PackedMatrix.pack(raw, None, int8_rows)
            whole = matrix.multiply(x)
            for count in range(1, 71):
                first = (70 - count) // 2
                part = np.ascontiguousarray(x[first : first + count])
                assert np.array_equal(matrix.multiply(part), whole[first : first + count]), (
                    name,
                    int8_rows,
                    count,
                )


@EACH_FORMAT
def test_any_number_of_threads_gives_the_same_bits(format: Format) -> None:
    raw, x = random_matrix(format, 200, 512), random_rows(9, 512)
    for int8_rows in row_kinds(format):
        products = []
        for count in (1, 2, 3):
            library().threads(count)
            products.append(PackedMatrix.pack(raw, None, int8_rows).multiply(x))
        assert np.array_equal(products[0], products[1])
        assert np.array_equal(products[0], products[2])


@pytest.mark.parametrize("shape", [(97, 24), (33, 40), (5, 7), (1, 1)])
def test_floats_of_any_shape_are_multiplied_and_looked_up(shape: tuple[int, int]) -> None:
    for format in (Format.F32, Format.F16, Format.BF16):
        raw, x = random_matrix(format, *shape), random_rows(3, shape[1])
        packed = PackedMatrix.pack(raw)
        assert (
            error_of(packed.multiply(x), x.astype(np.float64) @ raw.floats().astype(np.float64).T)
            < 1e-5
        )
        assert np.array_equal(packed.embed(np.arange(shape[0])), raw.floats())


@pytest.mark.parametrize(
    ("format", "bound"), [(Format.Q8_0, 0.006), (Format.Q4_1, 0.09)], ids=["Q8_0", "Q4_1"]
)
def test_rounding_keeps_the_numbers_nearly(format: Format, bound: float) -> None:
    raw = random_matrix(Format.F32, 20, 72)
    ours = raw.rounded(format)
    assert ours.inputs == 96
    assert error_of(ours.floats()[:, :72], raw.floats()) < bound
    x = random_rows(3, 72)  # narrower than the matrix
    PackedMatrix.pack(ours).multiply(np.full((3, 96), np.nan, np.float32))  # leaves nothing behind
    product, expected = PackedMatrix.pack(ours).multiply(x), x @ ours.floats()[:, :72].T
    assert error_of(product, expected) < 1e-5


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_the_best_outputs_are_found_with_all_instructions(
    norm: bool, temperature: float | None
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(1003, 72), torch.randn(1003)
    weight[7] = weight[5]  # of two equal scores, the first is better
    bias[5] = bias[7] = 90.0
    gain = torch.nn.RMSNorm(72, eps=1e-5)
    gain.weight.data.uniform_(0.5, 1.5)
    for name in instructions():
        assert library().use(name.encode()) == 0
        linear = packed_linear(weight, bias)
        for rows, width in ((1, 1), (3, 10), (20, 33), (2, 2000)):
            x = torch.randn(rows, 72)
            values, ids = linear.guess(x, width, temperature, gain if norm else None)
            scores = linear(gain(x) if norm else x)
            order = scores.argsort(dim=-1, descending=True, stable=True)[:, :width]
            log_p = scores if temperature is None else (scores / temperature).log_softmax(-1)
            expected = log_p.gather(1, order)
            assert values.shape == (rows, min(width, 1003))
            assert torch.allclose(values, expected, rtol=1e-4, atol=1e-3)
            assert torch.allclose(log_p.gather(1, ids), expected, rtol=1e-4, atol=1e-3)
            assert all(len(set(row)) == len(row) for row in ids.tolist())
            if width > 1:
                assert ids[:, :2].tolist() == [[5, 7]] * rows


def test_guesses_with_impossible_shapes_are_refused() -> None:
    linear = packed_linear(torch.randn(40, 64))
    assert linear.guess(torch.full((2, 64), torch.nan), 3, 0.5)[1].unique().tolist() == [0, 1, 2]
    for inputs, width in ((65, 3), (64, 0)):
        with pytest.raises(ValueError, match="guesses"):
            linear.guess(torch.zeros(2, inputs), width, None)


def test_zeros_and_large_numbers_are_rounded() -> None:
    values = np.zeros((3, 32), np.float32)
    values[1], values[2, 0] = -3.5, 6e4
    for format in (Format.Q8_0, Format.Q4_1):
        floats = RawMatrix.of(values).rounded(format).floats()
        assert np.isfinite(floats).all()
        assert np.allclose(floats, values, rtol=1e-2, atol=1e-2 * np.abs(values).max(1)[:, None])
    matrix = PackedMatrix.pack(RawMatrix.of(values).rounded(Format.Q8_0), int8_rows=True)
    assert np.array_equal(
        matrix.multiply(np.zeros((2, 32), np.float32)), np.zeros((2, 3), np.float32)
    )


def test_tiles_and_biases_of_another_size_are_refused() -> None:
    whole = PackedMatrix.pack(random_matrix(Format.Q8_0, 40, 64))
    for shape in ((41, 64), (4000, 64), (40, 96), (40, 65), (-40, 64), (0, 64)):
        if -(-shape[0] // 16) * 16 * shape[1] != 48 * 64:
            with pytest.raises(ValueError, match="tiles"):
                PackedMatrix(Format.Q8_0, shape, whole.tiles)
    with pytest.raises(ValueError, match="bias"):
        PackedMatrix(Format.Q8_0, (40, 64), whole.tiles, np.zeros(39, np.float32))


def test_ids_beyond_a_matrix_are_refused() -> None:
    packed = PackedMatrix.pack(random_matrix(Format.F32, 10, 32))
    for ids in ([10], [0, -1], [2**62]):
        with pytest.raises(IndexError):
            packed.embed(np.array(ids))


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_layer_computes_nearly_what_the_plain_one_does(bias: bool) -> None:
    torch.manual_seed(0)
    for inputs in (64, 72):
        linear, x = torch.nn.Linear(inputs, 50, bias=bias), torch.randn(2, 3, inputs)
        with torch.inference_mode():
            ours, theirs = packed_linear(linear.weight, linear.bias)(x), linear(x)
        assert ours.shape == theirs.shape
        assert float((ours - theirs).norm() / theirs.norm()) < 0.12


# ---- passes


def backbone_of(kind: str = "bf16", family: str = "llama", **shape: Any) -> Backbone:
    """Returns a random model over weights of a kind, wide enough that products add in more than one way."""
    dtype, quantize, rows = KINDS[kind]
    shape = {"hidden": 64, "vocab": 256, "positions": 1024, **shape}
    backbone = Backbone(tiny_model(family, **shape).to(dtype), tiny_tokenizer(shape["vocab"]))
    attach(backbone, "native", quantize=quantize, rows=rows)
    return backbone


def text_of(count: int, vocab: int = 256) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))


def rounded(network: Any, dtype: torch.dtype) -> Any:
    """Returns an fp32 network whose weights, and nothing else, are rounded to a type."""
    for weight in network.parameters():
        weight.data = weight.data.to(dtype).float()
    return network


def difference(backbone: Backbone, network: Any, text: torch.Tensor) -> float:
    """Returns how far a pass's logits are from the network's own, relative to their size."""
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = network(text[None]).logits[0]
    return float((forward(backbone, text).logits - expected).norm() / expected.norm())


@pytest.mark.quick
@EACH_FAMILY
@pytest.mark.parametrize("count", [1, 7, 9, 60, 300])
def test_a_pass_gives_the_networks_own_logits(family: str, count: int) -> None:
    shape = {"layers": 4, "vocab": 256, "hidden": 64}
    assert (
        difference(
            tiny_backbone(family, engine="native", **shape),
            tiny_model(family, **shape),
            text_of(count),
        )
        < 1e-5
    )


@pytest.mark.parametrize(
    ("kind", "bound"), [("fp16", 1e-5), ("bf16", 1e-5), ("int8-fp32", 0.05), ("int8", 0.08)]
)
def test_a_pass_of_other_number_types_gives_what_their_weights_do(kind: str, bound: float) -> None:
    network = rounded(tiny_model("qwen3", hidden=64, vocab=256, positions=1024), KINDS[kind][0])
    assert difference(backbone_of(kind, "qwen3"), network, text_of(50)) < bound


@pytest.mark.quick
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_fill_no_tile_are_computed(kind: str, tied: bool) -> None:
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    network = transformers.Qwen3ForCausalLM(config).eval()
    dtype, quantize, rows = KINDS[kind]
    network = network.to(dtype)
    backbone = Backbone(network, tiny_tokenizer(97))
    attach(backbone, "native", quantize=quantize, rows=rows)
    torch.manual_seed(3)
    network = rounded(transformers.Qwen3ForCausalLM(config).eval(), dtype)
    text, bound = text_of(40, 97), {"int8": 0.1, "int8-fp32": 0.05, "int4": 0.6}.get(kind, 1e-5)
    assert difference(backbone, network, text) < bound
    assert_same_bits(backbone, text, range(1, 30, 7))


def assert_same_bits(backbone: Backbone, text: torch.Tensor, starts: Any) -> None:
    """Asserts that rows have a whole pass's bits one by one, in a tree, and after its path is kept."""
    whole, cache = forward(backbone, text), backbone.engine.new_cache(1, 1)
    logits, hidden = whole.logits.clone(), whole.hidden
    for start in starts:
        done = cache.lengths[0]
        if start > done:
            forward(backbone, text[done:start], cache, logits="none")
        cache.truncate(0, start)
        out = forward(backbone, text[start : start + 1], cache)
        assert torch.equal(out.logits[0], logits[start]), start
        assert torch.equal(out.hidden[0], hidden[start]), start
        assert torch.equal(out.logits[0].argmax(), logits[start].argmax())
        cache.truncate(0, start)
        nodes = torch.full((TREE.size,), 7)
        nodes[PATH] = text[start : start + len(PATH)]
        out = forward(backbone, nodes, cache, TREE)
        for depth, node in enumerate(PATH):
            assert torch.equal(out.logits[node], logits[start + depth]), (start, depth)
            assert torch.equal(out.hidden[node], hidden[start + depth]), (start, depth)
        cache.keep(0, PATH)
        after = start + len(PATH)
        out = forward(backbone, text[after : after + 1], cache)
        assert torch.equal(out.logits[0], logits[after]), start


@EACH_KIND
def test_rows_of_the_lm_head_are_those_of_the_whole(kind: str) -> None:
    backbone = backbone_of(kind)
    ids = torch.tensor([5, 0, 63, 5])
    weight, bias = backbone.lm_head_rows(ids)
    assert torch.equal(weight, backbone.lm_head_weight[ids])
    assert bias is None


@pytest.mark.quick
@EACH_FAMILY
@EACH_KIND
def test_rows_have_the_same_bits_in_prompts_trees_and_one_by_one(kind: str, family: str) -> None:
    backbone = backbone_of(kind, family)
    assert backbone.engine.row_invariant
    assert_same_bits(
        backbone, text_of(600), (1, 5, 16, 31, 32, 77, 130, 247, 255, 256, 257, 511, 512, 590)
    )


@pytest.mark.quick
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_rows_have_the_same_bits_at_every_length(kind: str, family: str) -> None:
    backbone = backbone_of(kind, family)
    assert_same_bits(backbone, text_of(290), [*range(1, 141), *range(246, 270)])


@EACH_KIND
def test_a_batch_of_slots_has_the_bits_of_each_alone(kind: str) -> None:
    backbone, text = backbone_of(kind, "gemma3"), text_of(320)
    whole = forward(backbone, text)
    logits, hidden = whole.logits.clone(), whole.hidden
    lengths = (257, 3, 90)
    cache = backbone.engine.new_cache(4, 1)
    for slot, length in enumerate(lengths):
        forward(backbone, text[:length], cache, slot=slot + 1, logits="none")
    nodes = torch.full((3, TREE.size), 7)
    for row, length in enumerate(lengths):
        nodes[row, PATH] = text[length : length + len(PATH)]
    out = backbone.engine.forward(Plan(nodes, TREE.depth, TREE.mask, first=1), cache)
    for row, length in enumerate(lengths):
        for depth, node in enumerate(PATH):
            assert torch.equal(out.logits[row, node], logits[length + depth])
            assert torch.equal(out.hidden[row, node], hidden[length + depth])
    assert torch.equal(out.best, out.logits.argmax(-1).int())


def test_trees_of_their_own_verify_each_slot() -> None:
    backbone, text = backbone_of(), text_of(60)
    logits = forward(backbone, text).logits.clone()
    cache, other = backbone.engine.new_cache(2), Tree.chain(TREE.size - 1)
    for slot, length in enumerate((20, 33)):
        forward(backbone, text[:length], cache, slot=slot, logits="none")
    nodes = torch.full((2, TREE.size), 7)
    nodes[0, PATH] = text[20:24]
    nodes[1] = text[33 : 33 + TREE.size]
    plan = Plan(nodes, torch.stack([TREE.depth, other.depth]), torch.stack([TREE.mask, other.mask]))
    out = backbone.engine.forward(plan, cache)
    assert torch.equal(out.logits[0, PATH], logits[20:24])
    assert torch.equal(out.logits[1], logits[33 : 33 + TREE.size])


def test_any_number_of_threads_and_every_instruction_set_gives_a_pass_the_same_bits() -> None:
    for kind in KINDS:
        backbone, text, passes = backbone_of(kind, "gemma3"), text_of(70), []
        for name in instructions():
            library().use(name.encode())
            for count in (1, 2, 3):
                library().threads(count)
                out = forward(backbone, text)
                passes.append((out.logits.clone(), out.hidden))
        for logits, hidden in passes:
            assert torch.equal(logits, passes[0][0]), kind
            assert torch.equal(hidden, passes[0][1]), kind


def test_the_cache_keeps_swaps_truncates_and_grows() -> None:
    backbone, text = backbone_of(), text_of(80)
    whole = backbone.engine.new_cache()
    forward(backbone, text, whole)
    rows = rows_of(whole)
    cache = backbone.engine.new_cache(3, 1)
    forward(backbone, text[:30], cache, slot=2)
    nodes = torch.full((TREE.size,), 7)
    nodes[PATH] = text[30:34]
    forward(backbone, nodes, cache, TREE, slot=2)
    cache.keep(2, PATH)
    assert cache.lengths == [0, 0, 34]
    assert torch.equal(rows_of(cache, 2), rows[:, :, :, :34])
    forward(backbone, text[:5], cache, slot=0)
    cache.swap(0, 2)
    assert cache.lengths == [34, 0, 5]
    assert torch.equal(rows_of(cache, 0), rows[:, :, :, :34])
    assert torch.equal(rows_of(cache, 2), rows[:, :, :, :5])
    cache.truncate(0, 17)
    before = cache.capacity
    cache.reserve(before + 1)
    assert cache.capacity > before
    assert cache.capacity % 16 == 0
    assert torch.equal(rows_of(cache, 0), rows[:, :, :, :17])
    assert torch.equal(rows_of(cache, 2), rows[:, :, :, :5])
    forward(backbone, text[17:], cache, slot=0)
    assert torch.equal(rows_of(cache, 0), rows)
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes


def test_free_rows_of_the_cache_are_not_seen() -> None:
    backbone, text, outputs = backbone_of(), text_of(30), []
    for rest in (0.0, 50.0):
        cache = backbone.engine.new_cache(1, 64)
        cache.keys.fill_(rest)
        cache.values.fill_(rest)
        forward(backbone, text[:13], cache)
        outputs.append(forward(backbone, text[13 : 13 + TREE.size], cache, TREE).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.quick("int8")
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_context_can_be_filled_to_its_end(kind: str) -> None:
    backbone = backbone_of(kind, positions=48)
    expected = plain(backbone, 100)
    assert len(PROMPT) + len(expected) <= 49
    for tree in (TREE, DynamicTree(9, 3)):
        steps = generate(
            backbone, Oracle(expected, 0.7), TREE, PROMPT, max_new_tokens=100, stop_ids=()
        )
        assert tokens_of(steps) == expected
        drafted = generate(
            backbone, medusa_drafter(backbone), tree, PROMPT, max_new_tokens=100, stop_ids=()
        )
        assert tokens_of(drafted) == expected


@pytest.mark.quick("int4")
@EACH_KIND
def test_greedy_output_over_drafts_is_plain_decodings(kind: str) -> None:
    backbone = backbone_of(kind, layers=4)
    rules = {"max_new_tokens": 60, "stop_ids": ()}
    expected = tokens_of(generate_plain(backbone, PROMPT, **rules))
    for tree in (Tree.dense([3, 2, 2, 1]), Tree.dense([8, 6])):
        steps = list(generate(backbone, Oracle(expected, 0.6), tree, PROMPT, **rules))
        assert tokens_of(steps) == expected
        assert len(steps) < 50
    prompts = [PROMPT, list(range(5, 200)), [8]]
    together = generate_batch(
        backbone, medusa_drafter(backbone), TREE, prompts, batch_size=2, **rules
    )
    for prompt, steps in zip(prompts, together, strict=True):
        assert tokens_of(steps) == tokens_of(generate_plain(backbone, prompt, **rules))


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    backbone = backbone_of()
    for token in (-1, 256, 2**40):
        with pytest.raises(IndexError):
            forward(backbone, [5, token])


def test_two_threads_of_python_call_at_once() -> None:
    raw, x = random_matrix(Format.Q4_K, 200, 512), random_rows(9, 512)
    matrix = PackedMatrix.pack(raw)
    backbones, text = [backbone_of("bf16"), backbone_of("int8")], text_of(60)
    expected = [forward(backbone, text).logits.clone() for backbone in backbones]
    product = matrix.multiply(x)

    def work(number: int) -> bool:
        own = backbones[number]
        same = all(torch.equal(forward(own, text).logits, expected[number]) for _ in range(20))
        return same and all(np.array_equal(matrix.multiply(x), product) for _ in range(50))

    library().threads(2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


def test_a_forked_process_makes_its_own_threads() -> None:
    library().threads(2)
    matrix = PackedMatrix.pack(RawMatrix.of(np.ones((256, 64), np.float32)))
    rows = np.ones((2, 64), np.float32)
    expected = matrix.multiply(rows)  # the pool of threads exists
    context = multiprocessing.get_context("fork")

    def work(queue: Any) -> None:
        queue.put(bool((matrix.multiply(rows) == expected).all()))

    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get()
    assert (matrix.multiply(rows) == expected).all()


def test_what_does_not_fit_a_pass_never_reaches_the_library() -> None:
    """Holds under `python -O`, too, which drops asserts."""
    backbone, tokens = backbone_of(), torch.tensor([[1, 2, 3]])
    cache = backbone.engine.new_cache(1)
    depth, mask = torch.arange(3), torch.ones(3, 3, dtype=torch.bool).tril()
    shapes = [
        (tokens[0], None, None),
        (tokens[:, :0], None, None),
        (tokens, depth, None),
        (tokens, depth[:2], mask),
        (tokens, depth, mask[:2]),
        (tokens, depth, mask[:, :2]),
        (tokens, depth[None].repeat(2, 1), mask[None].repeat(2, 1, 1)),
    ]
    for shape in shapes:
        with pytest.raises(ValueError):
            Plan(*shape)
    plans = [
        Plan(tokens, first=1),
        Plan(tokens, taps=(99,)),
        Plan(tokens, taps=(-2,)),
        Plan(tokens, -depth, mask),
    ]
    for plan in plans:
        with pytest.raises(ValueError):
            backbone.engine.forward(plan, cache)
    with pytest.raises(IndexError):
        backbone.engine.forward(Plan(tokens + 10**6), cache)
    with pytest.raises(ValueError):
        backbone.engine.forward(Plan(tokens), backbone_of().engine.new_cache(1))
    with pytest.raises(ValueError):
        cache.keep(0, [0, 10**6])
    matrix = PackedMatrix.pack(RawMatrix.of(np.ones((16, 32), np.float32)))
    for rows in (np.ones((2, 32)), np.ones((32, 2), np.float32).T, np.ones((1, 64), np.float32)):
        with pytest.raises(ValueError):
            matrix.multiply(rows)
    with pytest.raises(ValueError):
        RawMatrix(Format.Q8_0, np.zeros((1, 10), np.uint8), 32)


# ---- other kinds of layers


def variant_of(variant: str, kind: str = "fp32", **fields: Any) -> Backbone:
    dtype, quantize, rows = KINDS[kind]
    backbone = Backbone(tiny_network(variant, **fields).to(dtype), tiny_tokenizer(128))
    attach(backbone, "native", quantize=quantize, rows=rows)
    return backbone


@pytest.mark.quick(
    "fp32-apertus",
    "fp32-cohere2",
    "fp32-gemma2",
    "fp32-glm4",
    "fp32-granitemoeshared",
    "fp32-hunyuan_v1_dense",
    "fp32-nemotron",
    "fp32-olmo",
    "fp32-phimoe",
    "fp32-smollm3",
    "fp32-stablelm",
)
@EACH_VARIANT
@pytest.mark.parametrize("kind", ["fp32", "int4"])
def test_variant_gives_its_networks_logits_with_the_same_bits_everywhere(
    variant: str, kind: str
) -> None:
    backbone, text = variant_of(variant, kind), text_of(80, 128)
    whole = forward(backbone, text).logits.clone()
    if kind == "fp32":
        with torch.inference_mode():
            expected = tiny_network(variant)(text[None]).logits[0]
        assert float((whole - expected).norm() / expected.norm()) < 1e-4
    assert_same_bits(backbone, text, (1, 14, 16, 33, 60))
    cache = backbone.engine.new_cache(3, 1)
    forward(backbone, text[:30], cache, slot=1, logits="none")
    forward(backbone, text[:41], cache, slot=2, logits="none")
    rows = torch.stack([text[30:35], text[41:46]])
    out = backbone.engine.forward(Plan(rows, None, None, first=1), cache)
    assert torch.equal(out.logits[0], whole[30:35])
    assert torch.equal(out.logits[1], whole[41:46])
    for name in instructions():
        library().use(name.encode())
        for count in (1, 3):
            library().threads(count)
            assert torch.equal(forward(backbone, text).logits, whole), (name, count)


@pytest.mark.quick("exaone_moe")
@pytest.mark.parametrize(
    "variant",
    [
        *("qwen3_moe", "mixtral", "exaone_moe", "ernie4_5_moe", "granitemoe", "gemma3"),
        *("gpt_oss", "phimoe", "apertus"),
    ],
)
def test_weights_of_experts_and_wrappers_are_mapped(
    variant: str, tmp_path: Path, apart: Path
) -> None:
    network = tiny_network(variant)
    for name, values in network.state_dict().items():
        if name.endswith(("e_score_correction_bias", "proj_bias", "alpha_p", "alpha_n")):
            values.copy_(torch.linspace(-1, 1, values.numel()).view_as(values))
    path = save_network(network, tmp_path / "model")
    text = text_of(30, 128)
    with torch.inference_mode():
        expected = network(text[None]).logits[0]
    backbone = load(path)
    assert backbone.engine.model.packed.memory is not None
    logits = forward(backbone, text).logits
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    for options in ({"quantize": "int4"}, {"quantize": "int8", "activations": "int8"}):
        rounded_logits = forward(load(path, **options), text).logits
        assert torch.isfinite(rounded_logits).all()


def save_mxfp4(folder: Path) -> tuple[str, Any]:
    """Saves a tiny gpt-oss with random experts in MXFP4; returns its path, and the network with their values."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    network = rounded(tiny_network("gpt_oss", intermediate_size=64), torch.bfloat16)
    path = save_network(copy.deepcopy(network).to(torch.bfloat16), folder)
    chance = torch.Generator().manual_seed(0)
    tensors = {name: values.bfloat16() for name, values in network.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=chance, dtype=torch.uint8)
        scales = torch.randint(123, 126, shape, generator=chance, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        network.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return path, network


@pytest.mark.slow
def test_weights_in_mxfp4_are_mapped_with_their_exact_values(tmp_path: Path, apart: Path) -> None:
    path, network = save_mxfp4(tmp_path / "model")
    text = text_of(30, 128)
    with torch.inference_mode():
        expected = network(text[None]).logits[0]
    backbone = load(path)
    packed = backbone.engine.model.packed
    assert packed.memory is not None
    experts = [own for name, own in packed.matrices.items() if ".experts." in name]
    assert {own.format for own in experts} == {Format.MXFP4}
    others = [own for own in packed.matrices.values() if own not in experts]
    assert {own.format for own in others} == {Format.BF16}
    logits = forward(backbone, text).logits
    assert float((logits - expected).norm() / expected.norm()) < 1e-4
    rounded_logits = forward(load(path, activations="int8"), text).logits
    assert 1e-4 < float((rounded_logits - expected).norm() / expected.norm()) < 0.3
    for options in ({"quantize": "int4"}, {"quantize": "int8"}):
        assert torch.isfinite(forward(load(path, **options), text).logits).all()


@pytest.mark.quick("damage0")
@pytest.mark.parametrize(
    "damage",
    [
        {"gate_up_proj_blocks": torch.zeros(4, 128, 2, 15, dtype=torch.uint8)},
        {"gate_up_proj_blocks": torch.zeros(4, 128, 2, 16)},
        {"gate_up_proj_blocks": torch.zeros(3, 127, 2, 16, dtype=torch.uint8)},
        {"gate_up_proj_bias": torch.zeros(4, 127)},
        {"down_proj_scales": torch.zeros(4, 64, 3, dtype=torch.uint8)},
        {"down_proj_scales": None},
        {"down_proj_scales": torch.full((4, 64, 2), 253, dtype=torch.uint8)},
    ],
)
def test_damaged_mxfp4_is_refused(
    damage: dict[str, torch.Tensor | None], tmp_path: Path, apart: Path
) -> None:
    path, _ = save_mxfp4(tmp_path / "model")
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    for part, values in damage.items():
        name = f"model.layers.1.mlp.experts.{part}"
        del tensors[name]
        if values is not None:
            tensors[name] = values
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError):
        load(path)


def test_layers_that_a_quantization_replaces_are_left_to_transformers(
    tmp_path: Path, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is to be compiled.
    monkeypatch.setattr("torch._dynamo.config.disable", True)
    path = save_network(tiny_network("bitnet"), tmp_path / "model")
    assert load(path).engine.name == "native"
    config = json.loads((Path(path) / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    }
    (Path(path) / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="engine native"):
        load(path)


def assert_native_logits(network: Any, text: torch.Tensor) -> None:
    """Asserts that the native engine gives a network's own logits."""
    backbone = Backbone(network, tiny_tokenizer(128))
    attach(backbone, "native")
    logits = forward(backbone, text).logits
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = network(text[None]).logits[0]
    assert float((logits - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.quick(
    "gemma4_text-fields0", "granitemoeshared-fields5", "nanochat-fields10", "olmo-fields8"
)
@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        ("gemma4_text", {"use_double_wide_mlp": True}),
        ("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
        ("stablelm", {"use_parallel_residual": True}),
        ("phi", {"qk_layernorm": True}),
        ("granitemoeshared", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3}),
        ("cohere2", {"logit_scale": 0.3}),
        ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 0.9}),
        ("olmo", {"clip_qkv": 0.5}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("nanochat", {"num_key_value_heads": 1}),
        ("phimoe", {"router_jitter_noise": 0.4}),
    ],
)
def test_fields_of_a_variant_are_followed(variant: str, fields: dict[str, Any]) -> None:
    network, text = tiny_network(variant, **fields), text_of(40, 128)
    for name, values in network.state_dict().items():
        if name.endswith("layer_scalar"):
            values.fill_(0.7)
    assert_native_logits(network, text)


def test_layers_that_share_keys_have_no_rows_of_their_own() -> None:
    backbone = variant_of("gemma4_text")
    description, cache = backbone.engine.model.description, backbone.engine.new_cache(2, 16)
    assert [layer.place for layer in description.layers] == [0, 1, 0, 1]
    assert cache.layers == 2
    assert {dim for _, dim in cache.shapes.values()} == {16, 32}
    assert cache.nbytes == 16 * 2 * backbone.engine.row_bytes
    text = text_of(40, 128)
    forward(backbone, text, cache, slot=1)
    assert cache.capacity >= 40
    whole = forward(backbone, text).logits.clone()
    cache.swap(0, 1)
    cache.truncate(0, 33)
    assert torch.equal(forward(backbone, text[33:], cache).logits, whole[33:])


@pytest.mark.quick("query", "up")
@pytest.mark.parametrize("part", ["query", "value", "gate", "up"])
def test_formats_may_mix_in_a_layer(part: str) -> None:
    backbone, text = variant_of("phi3", "int8"), text_of(40, 128)
    expected = forward(backbone, text).logits.clone()
    model = backbone.engine.model
    description, packed = model.description, copy.copy(model.packed)
    packed.matrices = dict(packed.matrices)
    exact = pack_in_memory(description, NetworkWeights(tiny_network("phi3")), None, True)
    for layer in description.layers:
        packed.matrices[layer.matrices[part]] = exact.matrices[layer.matrices[part]]
    mixed = NativeModel(description, packed, rotary_of(backbone.model))
    backbone.engine = NativeEngine(backbone, mixed, True, "int8")
    logits = forward(backbone, text).logits
    assert 0 < float((logits - expected).norm() / expected.norm()) < 0.1
    assert_same_bits(backbone, text, (1, 16, 30))


def test_router_keeps_its_weights_and_rows() -> None:
    backbone = variant_of("qwen2_moe", "int4")
    description = backbone.engine.model.description
    matrices = backbone.engine.model.packed.matrices
    routers = [matrices[name] for name in description.routers]
    assert len(routers) == 2 * description.sizes["layers"]
    assert all(matrix.format == Format.BF16 and not matrix.struct.int8_rows for matrix in routers)
    read = backbone.engine.weight_bytes
    assert read < sum(matrix.nbytes for matrix in matrices.values()) - matrices["lm_head"].nbytes
    experts = [matrices[layer.matrices["up"]] for layer in description.layers]
    assert all(matrix.format == Format.Q4_1 and matrix.struct.int8_rows for matrix in experts)


def test_experts_of_equal_scores_are_the_first() -> None:
    network = tiny_network("qwen3_moe")
    for layer in network.model.layers:
        layer.mlp.gate.weight.data.zero_()
    backbone = Backbone(network, tiny_tokenizer(128))
    attach(backbone, "native")
    logits = forward(backbone, text_of(20, 128)).logits.clone()
    for layer in network.model.layers:
        layer.mlp.experts.down_proj.data[2:] = 7.0
    attach(backbone, "native")
    assert torch.equal(forward(backbone, text_of(20, 128)).logits, logits)


@pytest.mark.slow
def test_sinks_and_soft_caps_change_the_logits() -> None:
    text = text_of(30, 128)
    sunk, capped = tiny_network("granite_swa"), tiny_network("gemma2")
    for layer in sunk.model.layers:
        layer.self_attn.sinks.data.fill_(5.0)
    uncapped = tiny_network("gemma2", attn_logit_softcapping=None)
    for network, other in ((sunk, tiny_network("granite_swa")), (capped, uncapped)):
        logits = []
        for own in (network, other):
            backbone = Backbone(own, tiny_tokenizer(128))
            attach(backbone, "native")
            logits.append(forward(backbone, text).logits.clone())
        assert float((logits[0] - logits[1]).norm() / logits[1].norm()) > 0.05


@pytest.mark.quick("20.0")
@pytest.mark.parametrize("sink", [-1e4, 0.0, 20.0, 1e4])
def test_sinks_of_any_size_take_their_share_with_all_instructions(sink: float) -> None:
    network, text = tiny_network("gpt_oss"), text_of(40, 128)
    for layer in network.model.layers:
        layer.self_attn.sinks.data[::2] = sink
    backbone = Backbone(network, tiny_tokenizer(128))
    attach(backbone, "native")
    network.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = network(text[None]).logits[0]
    passes = []
    for name in instructions():
        library().use(name.encode())
        passes.append(forward(backbone, text).logits.clone())
        assert torch.equal(passes[-1], passes[0]), name
        assert_same_bits(backbone, text, (1, 16, 30))
    assert float((passes[0] - expected).norm() / expected.norm()) < 1e-4


def test_constants_of_activations_are_those_of_each_layer() -> None:
    network, text = tiny_network("apertus"), text_of(40, 128)
    for number, layer in enumerate(network.model.layers):
        own = layer.mlp.act_fn
        own.alpha_p.data.fill_(number - 1.0)
        own.alpha_n.data.fill_(1.0 - number)
        own.beta.fill_(0.2 + number)
    assert_native_logits(network, text)


def test_experts_chosen_by_sparsemixer_are_two() -> None:
    for fields in ({"num_local_experts": 2}, {"num_local_experts": 17}):
        assert_native_logits(tiny_network("phimoe", **fields), text_of(40, 128))
    with pytest.raises(UsageError, match="engine native"):
        variant_of("phimoe", num_local_experts=1)


def test_a_bound_of_queries_that_is_not_positive_is_refused() -> None:
    with pytest.raises(UsageError, match="bound"):
        variant_of("olmo", clip_qkv=-1.0)


def test_layers_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(tiny_network("phi").model.layers[0])
    own = kind.forward
    # Even if a test before had such a network verified.
    monkeypatch.setattr("medusa_cli.engine.load.verified", twin.verified)
    monkeypatch.setattr(kind, "forward", lambda self, *args, **more: 1.1 * own(self, *args, **more))
    with pytest.raises(UsageError, match="differ"):
        variant_of("phi")


# ---- packed files, and machines


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of packed weights, which is empty."""
    monkeypatch.setenv("MEDUSA_HOME", str(tmp_path / "home"))
    return home() / "packed"


def load(model: str, **options: Any) -> Backbone:
    return load_backbone(model, LoadOptions(dtype="fp32", engine="native", **options))


def logits_of(backbone: Backbone) -> torch.Tensor:
    return forward(backbone, PROMPT).logits.clone()


def test_weights_are_packed_once(model: str, apart: Path) -> None:
    first = load(model)
    [file] = apart.iterdir()
    written = file.stat().st_mtime_ns
    second = load(model)
    assert file.stat().st_mtime_ns == written
    assert list(apart.iterdir()) == [file]
    assert second.engine.model.packed.memory is not None
    assert torch.equal(logits_of(first), logits_of(second))
    load(model, quantize="int8")
    assert len(list(apart.iterdir())) == 2


def test_without_room_for_a_copy_packed_weights_are_mapped(
    model: str, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(load(model))
    monkeypatch.setattr("medusa_cli.engine.packed.free_memory", lambda device: 0)
    mapped = load(model)
    assert isinstance(mapped.engine.model.packed.memory, np.memmap)
    assert torch.equal(logits_of(mapped), expected)


def test_large_weights_are_read_in_pieces_onto_aligned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_cli.engine.packed.PIECE", 1 << 20)
    data = np.random.default_rng(0).integers(0, 256, 5_000_001, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    read = bytes_of(tmp_path / "file")
    assert np.array_equal(read, data)
    assert read.ctypes.data % 64 == 0


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "short": lambda data: data[:5],
    "cut": cut,
    "without its end": lambda data: data[:-40],
    "place of the list": lambda data: (2**60).to_bytes(8, "little") + data[8:],
    "list": lambda data: data[: int.from_bytes(data[:8], "little")] + b"{" * 50,
    "no list": lambda data: data[: int.from_bytes(data[:8], "little")] + b"[1]",
    "number": lambda data: data[: int.from_bytes(data[:8], "little")] + b"7",
    "zeros": lambda data: bytes(len(data)),
    "version": lambda data: data.replace(b'"version": ', b'"version": 9'),
    "format": lambda data: data.replace(b'"F32"', b'"F99"'),
    "other format": lambda data: data.replace(b'"F32"', b'"F16"'),
    "shape": lambda data: data.replace(b'"shape": [64, 32]', b'"shape": [640,32]'),
    "negative shape": lambda data: data.replace(b'"shape": [64, 32]', b'"shape": [-4, 32]'),
    "negative place": lambda data: data.replace(b'"tiles": [64', b'"tiles": [-64'),
    "name": lambda data: data.replace(b"model.norm", b"model.mron"),
}


@pytest.mark.quick("cut", "list", "version", "other format", "negative place", "name")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_of_packed_weights_is_written_again(
    kind: str, model: str, apart: Path
) -> None:
    expected = logits_of(load(model))
    [file] = apart.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[kind](whole))
    assert kind in ("zeros",) or file.read_bytes() != whole
    assert torch.equal(logits_of(load(model)), expected)
    assert file.read_bytes() == whole
    assert list(apart.iterdir()) == [file]


def test_weights_that_cannot_be_kept_are_packed_in_memory(model: str, apart: Path) -> None:
    apart.parent.mkdir()
    apart.write_text("a file in the folder's place")
    backbone = load(model)
    assert backbone.engine.model.packed.memory is None
    apart.unlink()
    assert torch.equal(logits_of(backbone), logits_of(load(model)))


def test_a_changed_model_is_packed_again(tmp_path: Path, apart: Path) -> None:
    before = logits_of(load(save_model(tmp_path / "model")))
    after = logits_of(load(save_model(tmp_path / "model", seed=1)))
    # The old file is removed, as nothing would ever use it.
    assert not torch.equal(before, after)
    assert len(list(apart.iterdir())) == 1


def fail(*arguments: Any) -> Any:
    raise AssertionError("a network was built")


def test_a_later_start_builds_no_network(
    model: str, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(model)
    tokens = plain(first, 20)
    monkeypatch.setattr("medusa_cli.model.load.check_architecture", fail)
    second = load(model)
    assert torch.equal(logits_of(first), logits_of(second))
    assert plain(second, 20) == tokens
    assert first.identity == second.identity
    assert first.eos_ids == second.eos_ids


def test_a_network_is_built_when_it_is_read(model: str, apart: Path) -> None:
    first, second = load(model), load(model)
    assert type(second.model) is type(first.model)
    assert second.model.generation_config is second.generation_config


def test_a_text_beyond_the_kept_rotary_tables_builds_the_network(
    model: str, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(load(model))
    monkeypatch.setattr("medusa_cli.engine.description_cache.POSITIONS", 8)
    load(model)
    assert torch.equal(logits_of(load(model)), expected)


def test_rotary_tables_that_change_with_the_text_are_those_of_the_context(
    tmp_path: Path, apart: Path
) -> None:
    config = tiny_model().config
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    network = transformers.LlamaForCausalLM(config).eval()
    model = save_network(network, tmp_path / "model")
    tokens = torch.arange(60) % 40
    expected = network(tokens[None]).logits[0]
    for _ in range(2):  # verified, and as kept
        backbone = load_backbone(model, LoadOptions(dtype="fp32"))
        torch.testing.assert_close(forward(backbone, tokens).logits, expected, rtol=1e-3, atol=1e-3)
        assert backbone.max_positions == 64


@pytest.mark.parametrize(
    "kinds", [["a"] * 9 + ["b"], ["a"] * 9 + ["b", "c"], ["a"] * 6 + ["b"] + ["c"] * 3]
)
def test_a_twin_has_layers_of_every_kind(kinds: list[str]) -> None:
    chosen = twin._chosen_kinds(kinds, 0)
    assert set(chosen) == set(kinds)
    assert len(chosen) < len(kinds)


def test_a_changed_config_is_verified_again(tmp_path: Path, apart: Path) -> None:
    model = save_model(tmp_path / "model")
    before = logits_of(load(model))
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["rms_norm_eps"] = 0.5
    path.write_text(json.dumps(config))
    assert not torch.allclose(logits_of(load(model)), before)


@pytest.mark.quick("cut", "layer")
@pytest.mark.parametrize("kind", ["empty", "cut", "zeros", "layer"])
def test_a_damaged_description_is_made_again(kind: str, model: str, apart: Path) -> None:
    expected = logits_of(load(model))
    [file] = (home() / "descriptions").iterdir()
    whole = file.read_bytes()
    damage = {**DAMAGE, "layer": lambda data: data.replace(b'\\"place\\": 1', b'\\"place\\": 9')}
    file.write_bytes(damage[kind](whole))
    assert file.read_bytes() != whole
    assert torch.equal(logits_of(load(model)), expected)
    assert file.stat().st_size == len(whole)
    assert file.read_bytes() != damage[kind](whole)


@pytest.fixture
def reloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads the library again in a test, and as it was after it."""
    library.cache_clear()
    yield
    monkeypatch.undo()
    library.cache_clear()


@pytest.fixture
def not_compiled(reloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the library."""
    # The package has a function of the same name as the module.
    monkeypatch.setattr(
        importlib.import_module("medusa_cli.native.library"), "LIBRARY", tmp_path / "missing.so"
    )


def test_without_the_library_the_eager_engine_runs(model: str, not_compiled: None) -> None:
    backbone = load_backbone(model, LoadOptions(dtype="fp32"))
    assert backbone.engine.name == "eager"
    expected = plain(backbone, 20)
    drafted = generate(
        backbone, medusa_drafter(backbone), TREE, PROMPT, max_new_tokens=20, stop_ids=()
    )
    assert tokens_of(drafted) == expected
    document = medusa_json("machine", "--model", model, "--context", "9", "--dtype", "fp32")
    assert document["instructions"] == []
    assert "compiled" in document["native"]
    assert "eager" in document["engine"]
    for options in ({"engine": "native"}, {"quantize": "int8"}):
        with pytest.raises(UsageError, match="compiled"):
            load_backbone(model, LoadOptions(dtype="fp32", **options))


def test_a_library_of_another_machine_or_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, not_compiled: None
) -> None:
    (tmp_path / "missing.so").write_bytes(b"no library")
    assert not is_available()


def test_a_library_with_other_structures_is_not_used(
    monkeypatch: pytest.MonkeyPatch, not_compiled: None
) -> None:
    """Two pointers change places, which no size tells."""
    module = importlib.import_module("medusa_cli.native.library")
    text = Path(module.__file__).with_name("structures.def").read_text(encoding="utf-8")
    keys, values = "FIELD(float*, keys)\n", "FIELD(float*, values)\n"
    monkeypatch.setattr(module, "LIBRARY", LIBRARY)
    assert is_available()
    library.cache_clear()
    swapped = text.replace(keys + values, values + keys)
    monkeypatch.setattr(module, "DECLARED", module.Declarations(swapped))
    assert "another version" in (why_unavailable() or "")


def test_a_structure_takes_its_fields_only() -> None:
    step = Step(rows=2)
    assert step.rows == 2
    with pytest.raises(AttributeError):
        Step(row=2)
    with pytest.raises(AttributeError):
        step.row = 2


def test_an_unknown_instruction_set_is_named_in_one_line(
    model: str, reloaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = instructions()
    library.cache_clear()
    monkeypatch.setenv("MEDUSA_CPU", "pentium")
    words = ["--engine", "native", "--lookup", "--prompt", "w1"]
    done = medusa("chat", "--model", model, *words, exit_code=None)
    assert done.exit_code in (1, 2)
    assert "pentium" in done.stderr
    assert known[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_named_instruction_set_is_used() -> None:
    code = "from medusa_cli.native import instruction_set; print(instruction_set())"
    done = python(code, env={**os.environ, "MEDUSA_CPU": "GENERIC"})
    assert done.stdout.strip() == "generic", done.stderr


def test_the_machine_says_what_runs_a_model(model: str) -> None:
    document = medusa_json("machine", "--model", model, "--context", "9,40")
    assert document["engine"].startswith("native")
    assert document["row_invariant"] is True
    assert f"{instruction_set()})" in document["engine"]
    assert document["instructions"] == instructions()
    assert list(document["contexts"]) == ["9", "40"]
    assert document["weight_bytes"] > 0


def test_digests_are_those_of_all_instruction_sets(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = medusa_json("machine", "--digest", "--model", model)
    assert list(document["digests"]) == instructions()
    assert len({*document["digests"].values()}) == 1
    assert document["published"] is None
    assert document["equal"] is True
    monkeypatch.setitem(PUBLISHED, model, "0" * 16)
    assert instructions()[0] in medusa("machine", "--digest", "--model", model, exit_code=1).stdout
    # Nothing is published for numbers of another type.
    rounded = medusa_json("machine", "--digest", "--model", model, "--dtype", "bf16")
    assert rounded["published"] is None
    assert rounded["digests"] != document["digests"]


def test_digests_need_the_native_engine(model: str) -> None:
    for words in (["--engine", "eager"], ["--context", "9"]):
        refused = medusa("machine", "--digest", "--model", model, *words, exit_code=2)
        assert words[0] in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs LD_PRELOAD")
def test_refused_memory_is_an_error_of_one_pass(tmp_path: Path) -> None:
    path = refusing_library(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "tests.refusing", str(path)],
        env={**os.environ, "LD_PRELOAD": str(path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    refused, same = run.stdout.split()
    assert int(refused) > 5
    assert same == "True"


def test_rotary_tables_grow_in_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads reserve more and more positions; the table is never shorter than `positions` says."""
    model = backbone_of().engine.model
    rotary, running = model._rotary, []

    def slow(positions: Any, kind: str) -> Any:
        running.append(len(positions[0]))
        assert len(running) == 1
        time.sleep(0.01)
        running.clear()
        return rotary(positions, kind)

    monkeypatch.setattr(model, "_rotary", slow)
    counts = [model.struct.positions + 1000 * n for n in (3, 1, 4, 2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(model.reserve, counts))
    assert model.struct.positions >= max(counts)
    assert len(model._tables[-1][0]) == model.struct.positions
