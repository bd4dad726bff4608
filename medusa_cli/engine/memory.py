"""The memory that a model needs on a GPU, computed from the headers of its files before any weight is read."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_cli.device import free_memory
from medusa_cli.errors import UserError
from medusa_cli.files.gguf_header import Tensor
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.backbone import key_sizes
from medusa_cli.model.load import read_config, resolve_dtype
from medusa_cli.native import Format
from medusa_cli.runs.load_options import INTEGER, LoadOptions

# The assumed numbers of tokens in the cache, rows of a prompt's pass, and nodes of a step.
TOKENS = 2048
PROMPT = 2048
NODES = 64
# Bytes per weight, including scales: bitsandbytes' nf4 has an fp32 scale for 64 numbers. int8 is Q8_0
# and int4 is Q4_1, which have scales for 32 numbers.
BYTES = {"bnb.int8": 1.0, "bnb.nf4": 0.5625, "int8": 34 / 32, "int4": 20 / 32}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes that a model needs: weights, the cache of `tokens` tokens, passes and their graphs, and a drafter."""

    weights: int
    cache: int
    passes: int
    drafter: int
    tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.passes + self.drafter

    @property
    def text(self) -> str:
        """Returns the total and its parts as one line of text."""
        drafter = f", drafter {self.drafter / 1e9:.2f}" if self.drafter else ""
        return (
            f"{self.total / 1e9:.2f} GB (weights {self.weights / 1e9:.2f}, cache of {self.tokens:,} tokens "
            f"{self.cache / 1e9:.2f}, passes and graphs {self.passes / 1e9:.2f}{drafter})"
        )


def memory_of(
    model: ModelSource, options: LoadOptions, device: torch.device, drafter: Path | None = None
) -> Memory | None:
    """Returns the memory that a model needs on a device; None if its files are not on this machine yet."""
    config = read_config(model, options.trust_remote_code)
    dtype = resolve_dtype(options.dtype, model, str(device), options.trust_remote_code)
    table = config.vocab_size * config.hidden_size
    weights = _weights(model, options, config, table, dtype.itemsize)
    heads, dim = key_sizes(config)
    if weights is None or not heads:
        return None
    tokens = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = max(inner) if isinstance(inner, list) else inner
    # Passes need a layer's states, the outputs of its two wide matrices, and a tree's logits, with a copy in fp32.
    states = PROMPT * (4 * config.hidden_size + 3 * inner) * dtype.itemsize
    logits = NODES * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    files = [] if drafter is None else [*drafter.glob("*.safetensors")]
    return Memory(
        weights,
        2 * config.num_hidden_layers * heads * dim * dtype.itemsize * tokens,
        states + logits,
        sum(file.stat().st_size for file in files),
        tokens,
    )


def _weights(
    model: ModelSource, options: LoadOptions, config: Any, table: int, itemsize: int
) -> int | None:
    """Returns the bytes of a model's weights; table: the number of embedding weights, which are never quantized."""
    if model.weights_in_gguf and options.quantize not in BYTES and options.engine != "eager":
        # Tiles take as many bytes as the file's tensors, within 3 %. Embeddings are dequantized, and
        # their tensor may also be the lm_head's.
        tensors = model.header.tensors
        sizes = {name: _stored(tensor, itemsize) for name, tensor in tensors.items()}
        embedding = sizes.get("token_embd.weight", 0) if "output.weight" in tensors else 0
        return sum(sizes.values()) - embedding + table * itemsize
    if model.weights_in_gguf:
        numbers = model.header.numbers
    elif model.kind == "random":
        numbers = _numbers_of(config)
    else:
        numbers = sum(math.prod(shape) for shape, _ in model.tensors.values())
    if not numbers:
        return None
    if options.quantize not in BYTES:
        return numbers * itemsize
    tied = bool(getattr(config, "tie_word_embeddings", False))
    layers = numbers - (1 if tied else 2) * table
    # With int4, too, the lm_head has 8 bits; bitsandbytes does not quantize it.
    head = table * BYTES["int8"] if options.quantize in INTEGER else (1 - tied) * table * itemsize
    return int(layers * BYTES[options.quantize] + head) + table * itemsize


def _stored(tensor: Tensor, itemsize: int) -> int:
    """Returns the bytes of a GGUF file's tensor on a device, where floats have the number type of the states."""
    if Format[tensor.type].is_float:
        return math.prod(tensor.shape) * itemsize
    return tensor.end - tensor.start


def _numbers_of(config: Any) -> int:
    """Returns the number of weights of a config's network."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(weight.numel() for weight in network.parameters())


def check_memory(
    model: ModelSource, options: LoadOptions, device: torch.device, drafter: Path | None = None
) -> None:
    """Logs the memory that a model needs on a GPU; raises UserError if less memory is free there."""
    needed = memory_of(model, options, device, drafter)
    if needed is None:
        return
    free = free_memory(device)
    facts = f"needs {needed.text}, and {device} has {free / 1e9:.2f} GB free"
    if needed.total > free:
        raise UserError(
            f"@model {model.name!r} {facts}",
            "give a smaller model, @quantize int4, a GGUF file such as Q4_K_M, or @device cpu",
        )
    log.info("%s %s", model.name, facts)
