"""Import of Medusa heads as saved by FasterDecoding, vLLM (up to 0.32) and TGI."""

import re
from typing import Any

import torch
from torch import Tensor

from medusa_cli.errors import UserError

# At most two digits: a malicious name must not make the code count to a billion.
KEY = re.compile(r"(\d\d?)\.(\d\d?)\.(linear\.weight|linear\.bias|weight)")


def read_medusa(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads heads from FasterDecoding (v1, and v2 without matrices), vLLM or TGI.

    Returns settings, tensors and notes. Raises UserError if there are no Medusa heads.
    """
    tensors = {plain_name(name): tensor for name, tensor in tensors.items()}
    ids = tensors.pop("token_map", None)
    keys = [key for name in tensors if (key := KEY.fullmatch(name)) and key[3] == "linear.weight"]
    if not keys:
        fault = "the checkpoint has no tensors named HEAD.LAYER.linear.weight"
        raise UserError(fault, "give Medusa heads")
    heads = 1 + max(int(key[1]) for key in keys)
    layers = 1 + max(int(key[2]) for key in keys)
    tensors = {
        re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name): tensor
        for name, tensor in tensors.items()
    }
    notes = []
    if not config.get("medusa_fc_bias") and not any(
        name.endswith(".linear.bias") for name in tensors
    ):
        notes.append("its layers have no biases")  # vLLM's form; zeros replace the biases
        for key in keys:
            weight = tensors[key[0]]
            tensors[f"{key[1]}.{key[2]}.linear.bias"] = weight.new_zeros(weight.shape[:1])
    if ids is not None:
        tensors["draft_ids"] = _checked_ids(ids, model.vocab_size)
    has_matrices = any(f"{k}.{layers}.weight" in tensors for k in range(heads))
    vocabulary = "own" if has_matrices else "shared"
    if ids is not None:
        vocabulary = "draft"
    settings = {
        "medusa_num_heads": heads,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "vocabulary": vocabulary,
        "draft_vocab_size": None if ids is None else len(ids),
        "matrices": "one" if config.get("original_lm_head") else "each",
    }
    return settings, tensors, notes


def _checked_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Returns a token_map as int32; raises UserError unless it lists distinct tokens of the model."""
    integers = (
        ids.dim() == 1
        and not ids.is_floating_point()
        and ids.dtype != torch.bool
        and ids.numel() > 0
    )
    if not integers or ids.min() < 0 or ids.max() >= vocabulary or len(ids.unique()) < len(ids):
        fault = "token_map is not a list of different tokens of the model"
        raise UserError(fault, "give the heads' own @model")
    return ids.to(torch.int32)


def plain_name(name: str) -> str:
    """Returns a tensor's name as in FasterDecoding's files.

    The given name may be in that form, in vLLM's form, or as in the files of a whole model.
    """
    name = re.sub(r"^(model\.)?medusa_heads?\.", "", name)
    return re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
