"""Whether a model folder and the network from it are sound: sizes that can be, all weights there, finite numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta

from medusa_cli.backbone.support import refuse_unsupported
from medusa_cli.errors import UserError, first_line, shown
from medusa_cli.runs.reading import read_as

# Tokens of the probe pass.
PROBE = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes in a model's config.json, where it names them, and the most that any model has by far."""

    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 24)] | list[int] | None = None
    num_attention_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    text_config: "Sizes | None" = None


def check_config(folder: str) -> None:
    """UserError where the config of a model folder names sizes that cannot be; before a layer is made of them."""
    path = Path(folder) / "config.json"
    if path.exists():
        read_as(path, Sizes, "the model's config", "get the model again")


def check_complete(info: dict[str, Any], model: str) -> None:
    """UserError where tensors of a network were not in its files: they would be random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"@model {model!r}: its files lack {len(missing)} tensors of the network, such as {shown(missing[0])}",
            "get the model again",
        )


def check_ends(owners: Sequence[Any], model: str) -> None:
    """UserError where a config or a tokenizer names something that is no token id as the end of an answer."""
    for owner in owners:
        found = getattr(owner, "eos_token_id", None)
        if not all(
            type(one) is int for one in (found if isinstance(found, list) else [] if found is None else [found])
        ):
            raise UserError(f"@model {model!r}: eos_token_id={shown(found)} is no token id", "get the model again")


@torch.no_grad()
def check_finite(network: Any, model: str) -> None:
    """UserError for a network that a tree cannot be verified with, or whose pass over a few tokens is not finite."""
    refuse_unsupported(network.config)
    rows = network.get_input_embeddings().weight
    ids = torch.arange(PROBE, device=rows.device)[None] % len(rows)
    try:
        finite = bool(torch.isfinite(network(input_ids=ids).logits).all())
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as reason:
        if isinstance(reason, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"@model {model!r} cannot be run: {first_line(reason)}", "check its config.json, or get it again"
        ) from reason
    if not finite:
        kind = str(rows.dtype).removeprefix("torch.")
        raise UserError(
            f"@model {model!r} computes numbers that are not finite in {kind}: its weights are damaged, or need more "
            "range",
            "get the model again, or try @dtype fp32",
        )
