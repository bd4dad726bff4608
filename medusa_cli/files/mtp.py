"""Finds the multi-token prediction (MTP) layer in a model's own checkpoint, by the names of its tensors.

transformers leaves these tensors out when it loads a model. Makers differ in names and in the order
of the projection's input; weights of RMS norms are 1 + w where the model's own norms are.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError
from medusa_cli.files.assets import RANDOM, check_hub, gguf_path, home, model_dir
from medusa_cli.files.io import read_object, write_json
from medusa_cli.files.model_files import checkpoint_files, config_fields, tensors_of

NAME = "mtp"
# Draft tokens by default: one layer is run again and again, and is trained for the first few.
LEVELS = 4
EMBEDDING = "embed_tokens.weight"
# Fields of a model's config that say nothing of a layer, or count layers that are not there.
LEFT_OUT = (
    "architectures",
    "auto_map",
    "layer_types",
    "mlp_layer_types",
    "mlp_only_layers",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
    "dtype",
)


@dataclass(frozen=True)
class Layout:
    """Maps our names of the parts around the layer to a maker's names.

    state_first: the projection reads [state; embedding], not [embedding; state]. inside: what
    precedes the names of the layer's own parts.
    """

    fc: str
    embedding_norm: str
    state_norm: str
    norm: str
    state_first: bool = False
    inside: str = ""
    prefix: str = ""

    def ours(self, name: str) -> str | None:
        """Returns our name of a checkpoint's tensor, None for one that the drafter does not hold."""
        if not name.startswith(self.prefix):
            return None
        part, _, end = name.removeprefix(self.prefix).rpartition(".")
        for own in ("fc", "embedding_norm", "state_norm", "norm"):
            if part == getattr(self, own):
                return f"mtp.{own}.{end}"
        inner = f"{part}.{end}"
        if not inner.startswith(self.inside) or part in COPIES:
            return None
        return f"mtp.layer.{inner.removeprefix(self.inside)}"


# Copies of the model's own matrices within the layer of a checkpoint.
COPIES = ("embed_tokens", "shared_head.head")
# Qwen3-Next, 3.5 and later; GLM-4.5 and later and DeepSeek-V3; MiMo.
QWEN = Layout(
    "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", inside="layers.0.", prefix="mtp."
)
DEEPSEEK = Layout("eh_proj", "enorm", "hnorm", "shared_head.norm")
MIMO = Layout(
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", state_first=True
)


def find_layout(names: Iterable[str], depth: int) -> Layout | None:
    """Returns the layout of the first MTP layer among a checkpoint's tensors, None if there is none.

    depth: the model's layers; GLM's and DeepSeek's MTP layer counts as one more.
    """
    places = {
        r"(.*\.)?mtp\.(?=fc\.weight$)": QWEN,
        rf"(.*\.)?layers\.{depth}\.(?=eh_proj\.weight$)": DEEPSEEK,
        r"(.*\.)?mtp_layers\.0\.(?=input_proj\.weight$)": MIMO,
    }
    for name in names:
        for place, layout in places.items():
            if found := re.match(place, name):
                return Layout(**{**vars(layout), "prefix": found[0]})
    return None


@dataclass(frozen=True)
class Source:
    """Holds where a model's MTP layer is: folder or hub id, the text config's fields, layout, all tensors."""

    place: str
    text: dict[str, Any]
    layout: Layout
    tensors: dict[str, tuple[list[int], str]]


def find_source(model: str) -> Source | None:
    """Returns where a model's MTP layer is, None if its files on this machine have none."""
    if model.startswith(RANDOM) or gguf_path(model) is not None:
        return None
    place = model_dir(model)
    fields = config_fields(place) or {}
    text = fields.get("text_config") or fields
    tensors = tensors_of(model)
    layout = find_layout(tensors, text.get("num_hidden_layers") or 0)
    return None if layout is None else Source(place, text, layout, tensors)


def need_source(model: str) -> Source:
    """Returns where a model's MTP layer is; UserError if its checkpoint has none. A hub id is downloaded."""
    if not model.startswith(RANDOM) and gguf_path(model) is None:
        _fetch(model_dir(model))
    source = find_source(model)
    if source is None:
        raise UserError(
            f"@drafter {NAME}: the checkpoint of {model} has no MTP layer",
            "leave @drafter out, or train one with `medusa train`",
        )
    return source


def _fetch(place: str) -> None:
    """Downloads the model of a hub id unless it is here."""
    if Path(place).is_dir() or checkpoint_files(place):
        return
    check_hub(place)
    from huggingface_hub import snapshot_download

    snapshot_download(place, allow_patterns=["*.json", "*.jinja", "*.txt", "*.safetensors"])


def mtp_settings(model: str) -> dict[str, Any]:
    """Returns the config.json of the drafter that a model's checkpoint holds; UserError if it holds none."""
    source = need_source(model)
    layout = source.layout
    text = {key: value for key, value in source.text.items() if key not in LEFT_OUT}
    text["num_hidden_layers"] = 1
    experts = any(".experts." in (layout.ours(name) or "") for name in source.tensors)
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0 if experts else 1
    if experts:
        text["mlp_layer_types"] = ["sparse"]  # some configs take the first layer for a dense one
    embedding = (shape for name, (shape, _) in source.tensors.items() if name.endswith(EMBEDDING))
    return {
        "drafter": NAME,
        "base_model_name_or_path": os.path.abspath(model) if Path(model).is_dir() else model,
        "num_heads": LEVELS,
        "num_layers": 1,
        "hidden_size": text.get("hidden_size"),
        "vocab_size": next(embedding, [text.get("vocab_size")])[0],
        "vocabulary": "shared",
        "state_first": layout.state_first,
        "text": text,
    }


def own_drafter(model: str) -> Path:
    """Returns the folder of the drafter that a model's checkpoint holds: a config without weights of its own."""
    settings = mtp_settings(model)
    key = hashlib.sha256(str(Path(model_dir(model)).absolute()).encode()).hexdigest()[:16]
    folder = home() / "drafters" / key
    path = folder / "config.json"
    if not path.is_file() or read_object(path, "the drafter's config") != settings:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    return folder
