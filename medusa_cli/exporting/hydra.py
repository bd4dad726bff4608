"""Hydra heads as the authors' code saves them: hydra_lm_head.pt and config.json."""

import re
from typing import Any

from torch import Tensor

from medusa_cli.errors import UserError
from medusa_cli.exporting.imported import Base, Imported, count_said
from medusa_cli.exporting.tensors import check_tensors

KEY = re.compile(r"hydra_mlp\.(\d\d?)\.(\d\d?)\.(.+)")


def import_hydra(found: dict[str, Tensor], config: dict[str, Any], base: Base, beside: dict[str, Any]) -> Imported:
    """Hydra's heads as the kind hydra; its biases of the vocabulary matrices are left out, which the notes say.

    UserError for the authors' other architectures, and, naming tensors, where they do not fit the model.
    """
    arch = config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or any(name.startswith("prefix_embeding_layer.") for name in found):
        raise UserError(f"the architecture hydra_head_arch={arch!r} cannot be run here", "give heads of the kind mlp")
    if config.get("hidden_state_offset"):
        raise UserError("these heads read an earlier layer (hidden_state_offset)", "give heads on the final states")
    keys = [key for name in found if (key := KEY.fullmatch(name)) and key[3] == "linear.weight"]
    if not keys:
        raise UserError("the checkpoint has no tensors named hydra_mlp.HEAD.LAYER.linear.weight", "give Hydra heads")
    if "hydra_mlp.0.0.res_connection.weight" not in found:
        raise UserError("these heads do not see the tokens before theirs (grounded_heads=false)", "give grounded ones")
    heads, layers = 1 + max(int(key[1]) for key in keys), 1 + max(int(key[2]) for key in keys)
    notes = list(count_said(config, ("hydra_num_heads",), heads, "heads"))
    check_tensors(found, _shapes(found, heads, layers, base), "the checkpoint of Hydra heads")
    tensors: dict[str, Tensor] = {}
    for k in range(heads):
        first = f"hydra_mlp.{k}.0"
        for end in ("weight", "bias"):
            tensors[f"blocks.{k}.skip.{end}"] = found[f"{first}.res_connection.{end}"]
            tensors[f"blocks.{k}.mix.{end}"] = found[f"{first}.linear.{end}"]
            for layer in range(1, layers):
                tensors[f"blocks.{k}.stack.{layer - 1}.linear.{end}"] = found[f"hydra_mlp.{k}.{layer}.linear.{end}"]
        tensors[f"matrices.{k}"] = found[f"hydra_lm_head.{k}.weight"]
    biases = [found[name].abs().max().item() for name in found if re.fullmatch(r"hydra_lm_head\.\d+\.bias", name)]
    if any(biases):
        notes.append(f"the biases of the vocabulary matrices, at most {max(biases):.2g}, are left out")
    ours = {
        "num_heads": heads,
        "num_layers": layers,
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "vocabulary": "own",
        "draft_vocab_size": None,
        "matrices": "each",
        "rank": None,
        "prefix_layers": 0,
        "taps": [],
        "raw": True,
    }
    return Imported("hydra", ours, tensors, notes=tuple(notes))


def _shapes(found: dict[str, Tensor], heads: int, layers: int, base: Base) -> dict[str, tuple[int, ...]]:
    """What the authors' state dict holds; the model's own embedding table and the biases may be missing."""
    size, words = base.hidden_size, base.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for name in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{k}.0.{name}.weight"] = (size, (k + 2) * size)
            shapes[f"hydra_mlp.{k}.0.{name}.bias"] = (size,)
        for layer in range(1, layers):
            shapes[f"hydra_mlp.{k}.{layer}.linear.weight"] = (size, size)
            shapes[f"hydra_mlp.{k}.{layer}.linear.bias"] = (size,)
        shapes[f"hydra_lm_head.{k}.weight"] = (words, size)
    optional = {f"hydra_lm_head.{k}.bias": (words,) for k in range(heads)} | {"input_embed_fn.weight": (words, size)}
    return shapes | {name: shape for name, shape in optional.items() if name in found}
