"""Models of a known shape with random weights, made on the device: for timing what cannot be downloaded."""

from typing import Any

import torch

from medusa_cli.errors import UsageError

PREFIX = "random:"
SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}


def blank_network(name: str, place: str, kind: torch.dtype) -> Any:
    """A Llama of the shape that "random:SHAPE" names; UsageError for an unknown one."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UsageError(f"--model {name!r}: there is no shape of the name {shape!r}", f"use {', '.join(SHAPES)}")
    with torch.device(place):
        return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=kind)
