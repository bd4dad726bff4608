"""Models of a known shape with random weights, made on the device: for timing what cannot be downloaded."""

from typing import Any

import torch

from medusa_cli.errors import UsageError

PREFIX = "random:"
# The shapes of Qwen2.5-0.5B, Llama-3.2-1B and 3B, and Llama-2-7B.
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "3b": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "llama-2-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}


def blank_config(name: str) -> Any:
    """The Llama config of the shape that "random:SHAPE" names; UsageError for an unknown one."""
    from transformers import LlamaConfig

    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UsageError(f"@model {name!r}: there is no shape of the name {shape!r}", f"use {', '.join(SHAPES)}")
    return LlamaConfig(**SHAPES[shape], dtype="bfloat16")


def blank_network(name: str, place: str, kind: torch.dtype) -> Any:
    """A Llama of the shape that "random:SHAPE" names, its weights drawn in the type asked for."""
    from transformers import AutoModelForCausalLM

    with torch.device(place):
        return AutoModelForCausalLM.from_config(blank_config(name), dtype=kind, trust_remote_code=False)
