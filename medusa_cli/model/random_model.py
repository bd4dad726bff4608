"""Models of a known shape with random weights, for timing models that cannot be downloaded."""

from typing import Any

from medusa_cli.assets import RANDOM
from medusa_cli.errors import UsageError

FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
SHAPES = {
    "0.36b": (49152, 960, 2560, 32, 15, 5, 4096),  # SmolLM2-360M
    "0.5b": (151936, 896, 4864, 24, 14, 2, 4096),  # Qwen2.5-0.5B
    "1b": (128256, 2048, 8192, 16, 32, 8, 4096),  # Llama-3.2-1B
    "1.7b": (49152, 2048, 8192, 24, 32, 32, 4096),  # SmolLM2-1.7B
    "3b": (128256, 3072, 8192, 28, 24, 8, 4096),  # Llama-3.2-3B
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32, 4096),
}


def random_config(name: str) -> Any:
    """Returns the Llama config of "random:SHAPE"; UsageError for an unknown shape."""
    from transformers import LlamaConfig

    shape = name.removeprefix(RANDOM)
    if shape not in SHAPES:
        raise UsageError(f"@model {name!r}: the shape {shape!r} is unknown", f"use {', '.join(SHAPES)}")
    return LlamaConfig(**dict(zip(FIELDS, SHAPES[shape], strict=True)), dtype="bfloat16")
