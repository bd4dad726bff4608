"""Writes a GGUF file of Qwen3-30B-A3B's shape in Q4_K and Q6_K with random weights, one tensor at a time.

`python -m tests.bench.mixture FILE` writes all 48 layers (18 GB); `--layers 12` writes a quarter of them. The tokenizer
is that of the named model qwen2.5-coder-0.5b, whose vocabulary has the same size.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from medusa_cli.files.gguf_header import read_header
from medusa_cli.files.model_source import ModelSource

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, USED, WIDTH = 128, 8, 768
LAYERS, VOCAB, CONTEXT = 48, 151_936, 40_960
TOKENIZER = "qwen2.5-coder-0.5b"
# The 6-bit scales and mins of all groups in a block of Q4_K are 32, and the scales of Q6_K are 16.
SCALES_Q4_K = [160] * 8 + [0] * 4
SCALE_Q6_K = 16
# The standard deviations of the numbers 0 .. 15 and 0 .. 63.
SPREAD_4, SPREAD_6 = 4.61, 18.47
# How much surer a router is than one with weights of the usual size.
SURE = 3.0


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    """Yields the name, shape and type of each tensor, with the types of Q4_K_M."""
    yield "token_embd.weight", (VOCAB, HIDDEN), Kind.Q4_K
    for layer in range(layers):
        # As in Q4_K_M, about half of the layers have larger types in some places.
        wide = Kind.Q6_K if layer % 2 == 0 else Kind.Q4_K
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (HIDDEN,), Kind.F32
        yield f"{block}.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN), Kind.Q4_K
        yield f"{block}.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN), Kind.Q4_K
        yield f"{block}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN), wide
        yield f"{block}.attn_q_norm.weight", (HEAD_DIM,), Kind.F32
        yield f"{block}.attn_k_norm.weight", (HEAD_DIM,), Kind.F32
        yield f"{block}.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM), Kind.Q4_K
        yield f"{block}.ffn_norm.weight", (HIDDEN,), Kind.F32
        yield f"{block}.ffn_gate_inp.weight", (EXPERTS, HIDDEN), Kind.F32
        yield f"{block}.ffn_gate_exps.weight", (EXPERTS, WIDTH, HIDDEN), Kind.Q4_K
        yield f"{block}.ffn_up_exps.weight", (EXPERTS, WIDTH, HIDDEN), Kind.Q4_K
        yield f"{block}.ffn_down_exps.weight", (EXPERTS, HIDDEN, WIDTH), wide
    yield "output_norm.weight", (HIDDEN,), Kind.F32
    yield "output.weight", (VOCAB, HIDDEN), Kind.Q6_K


def random_tensor(shape: tuple[int, ...], kind: Kind, chance: np.random.Generator) -> Any:
    """Returns a tensor as a file stores it: random numbers of a size that keeps states of theirs."""
    size = shape[-1] ** -0.5
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    if kind == Kind.F32:
        return SURE * size * chance.standard_normal(shape, np.float32)
    block, count = gguf.GGML_QUANT_SIZES[kind]
    rows = chance.integers(0, 256, (*shape[:-1], shape[-1] // block, count), dtype=np.uint8)
    if kind == Kind.Q4_K:
        scale = size / (32 * SPREAD_4)
        rows[..., :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
        rows[..., 4:16] = SCALES_Q4_K
    else:
        rows[..., 192:208] = SCALE_Q6_K
        rows[..., 208:] = np.array([size / (SCALE_Q6_K * SPREAD_6)], np.float16).view(np.uint8)
    return rows.reshape(*shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Adds the tokenizer of a named model to a file."""
    path = ModelSource.of(TOKENIZER).gguf
    assert path is not None
    metadata = read_header(path, arrays=True).metadata
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def write(path: Path, layers: int) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(CONTEXT)
    writer.add_block_count(layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer)
    listed = list(tensors(layers))
    for name, shape, kind in listed:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * size)
        count = int(np.prod(stored))
        if kind == Kind.F32:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), count)
        else:
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), count, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    chance = np.random.default_rng(0)
    for _, shape, kind in listed:
        writer.write_tensor_data(random_tensor(shape, kind, chance))
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    given = parser.parse_args()
    write(given.file, given.layers)
