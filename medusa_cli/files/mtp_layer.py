"""The multi-token prediction (MTP) layer in a model's own checkpoint, found by the names of its tensors.

transformers ignores these tensors when it loads a model. Makers use different names, and different orders for the
two inputs of the projection. The layer's RMS norms multiply by 1 + weight if the model's own norms do.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_cli.errors import UserError, shown
from medusa_cli.files.catalogue import MODELS
from medusa_cli.files.hub import hub_folder, hub_gguf
from medusa_cli.files.io import read_object, write_json
from medusa_cli.files.model_source import ModelSource, lasting_name
from medusa_cli.files.paths import READ_ONLY, home, temporary_home

NAME = "mtp"
# Default number of draft tokens. The one layer runs once for each token, but was trained only for the
# first few tokens.
LEVELS = 4
EMBEDDING = "embed_tokens.weight"
# Fields of a model's config that do not describe a layer, or that describe layers which the drafter lacks.
LEFT_OUT = (
    *("architectures", "auto_map", "layer_types", "mlp_layer_types", "mlp_only_layers"),
    *("per_layer_config", "quantization_config", "torch_dtype", "dtype"),
)


@dataclass(frozen=True)
class Layout:
    """Maps this program's names of the parts around the MTP layer to a maker's names.

    state_first: the projection reads [state; embedding], not [embedding; state]. prefix: the prefix of
    all names. inside: what follows `prefix` in the names of the layer's own parts.
    """

    fc: str
    embedding_norm: str
    state_norm: str
    norm: str
    state_first: bool = False
    inside: str = ""
    prefix: str = ""

    def ours(self, name: str) -> str | None:
        """Returns this program's name for a checkpoint's tensor, or None for a tensor that the drafter lacks."""
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

    def theirs(self, name: str) -> str:
        """Returns the checkpoint's name for a tensor of the layer or of the parts around it."""
        part, _, end = name.rpartition(".")
        if part.startswith("layer."):
            return f"{self.prefix}{self.inside}{part.removeprefix('layer.')}.{end}"
        return f"{self.prefix}{getattr(self, part)}.{end}"


# Fields of a model's config that count its MTP layers.
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "n_predict")
# Copies of the model's own matrices inside the MTP layer of a checkpoint.
COPIES = ("embed_tokens", "shared_head.head")
# Layouts of Qwen3-Next, Qwen 3.5 and later; of DeepSeek-V3, GLM-4.5 and later; and of MiMo.
QWEN = Layout(
    "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", inside="layers.0.", prefix="mtp."
)
DEEPSEEK = Layout("eh_proj", "enorm", "hnorm", "shared_head.norm")
MIMO = Layout(
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", state_first=True
)


def find_layout(names: Iterable[str], depth: int) -> Layout | None:
    """Returns the layout of the first MTP layer among a checkpoint's tensors, or None if there is none.

    depth: the number of the model's layers, which is also the index of the MTP layer of GLM and DeepSeek.
    """
    for name in names:
        for place, layout in _places(depth).items():
            if match := re.fullmatch(rf"({place}){layout.fc}\.weight", name):
                return replace(layout, prefix=match[1])
    return None


def _places(depth: int) -> dict[str, Layout]:
    """Returns the layout of the MTP layer at each place. A place is a pattern for the prefix of its tensors' names."""
    return {
        r"(?:.*\.)?mtp\.": QWEN,
        rf"(?:.*\.)?layers\.{depth}\.": DEEPSEEK,
        r"(?:.*\.)?mtp_layers\.0\.": MIMO,
    }


def missing_projection(names: Collection[str], depth: int) -> str | None:
    """Returns the name of the missing projection of an MTP layer whose norms are there; None if there is no norm.

    names: the names of the tensors in a checkpoint and in its index.
    """
    for name in names:
        for place, layout in _places(depth).items():
            norms = "|".join(map(re.escape, (layout.embedding_norm, layout.state_norm, layout.fc)))
            if match := re.fullmatch(rf"({place})(?:{norms})\.weight", name):
                return f"{match[1]}{layout.fc}.weight"
    return None


def layout_of(model: ModelSource) -> Layout | None:
    """Returns the layout of a model's MTP layer, or None if the model's files on this machine have none.

    In a GGUF file, the MTP layers of all makers have GLM's layout, and the config counts those that the file holds.
    """
    if model.kind == "random" or model.must_be_fetched:
        return None
    depth = model.text_fields.get("num_hidden_layers") or 0
    if not model.weights_in_gguf:
        return find_layout(model.tensors, depth)
    if not any(model.text_fields.get(key) for key in COUNTS):
        return None
    return replace(DEEPSEEK, prefix=f"model.layers.{depth}.")


def need_layout(model: ModelSource) -> Layout:
    """Returns the layout of a model's MTP layer; downloads a hub model. Raises UserError if there is no such layer.

    Named models are not downloaded, because they have no MTP layer.
    """
    if model.must_be_fetched and model.name not in MODELS:
        hub_gguf(model.name)
    if model.kind == "hub" and not model.checkpoint:
        hub_folder(model.folder, ["*.json", "*.jinja", "*.txt", "*.safetensors"], "@model")
    layout = layout_of(model)
    if layout is None:
        raise _no_layer(model)
    return layout


def _no_layer(model: ModelSource) -> UserError:
    """Returns the error for a model without an MTP layer, or with a part of one."""
    otherwise = "leave @drafter out, or train one with `medusa train`"
    fault = f"@drafter {NAME}: the checkpoint of {model.name} has no MTP layer"
    if model.kind == "random":
        return UserError(fault, otherwise)
    if model.kind == "gguf":
        return UserError(
            fault, f"give a file that has one, such as those with MTP in their names, {otherwise}"
        )
    text = model.text_fields
    names = [*model.tensors, *model.index]
    lost = missing_projection(names, text.get("num_hidden_layers") or 0)
    if lost is not None:
        return UserError(
            f"@drafter {NAME}: the checkpoint of {model.name} lacks {lost}, the first tensor of its MTP layer",
            f"download the model again, {otherwise}",
        )
    counted = next((key for key in COUNTS if text.get(key)), None)
    if counted is not None:
        return UserError(
            f"{fault}, though its config.json counts {shown(text[counted])} ({counted})",
            f"download a checkpoint with it, {otherwise}",
        )
    return UserError(fault, otherwise)


def mtp_settings(model: ModelSource) -> dict[str, Any]:
    """Returns the config.json for the drafter in a model's checkpoint; raises UserError if there is no MTP layer."""
    layout = need_layout(model)
    text = {key: value for key, value in model.text_fields.items() if key not in LEFT_OUT}
    experts = any(".experts." in (layout.ours(name) or "") for name in model.tensors)
    if model.weights_in_gguf:
        experts = f"blk.{text['num_hidden_layers']}.ffn_gate_exps.weight" in model.header.tensors
    text["num_hidden_layers"] = 1
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0 if experts else 1
    if experts:
        text["mlp_layer_types"] = ["sparse"]  # some configs treat the first layer as dense
    embedding = (shape for name, (shape, _) in model.tensors.items() if name.endswith(EMBEDDING))
    return {
        "drafter": NAME,
        "base_model_name_or_path": lasting_name(model.name),
        "num_heads": LEVELS,
        "num_layers": 1,
        "hidden_size": text.get("hidden_size"),
        "vocab_size": next(embedding, [text.get("vocab_size")])[0],
        "vocabulary": "shared",
        "state_first": layout.state_first,
        "text": text,
    }


def own_drafter(model: ModelSource) -> Path:
    """Returns a folder for the drafter in a model's checkpoint. The folder contains a config but no weights."""
    settings = mtp_settings(model)
    key = hashlib.sha256(str(Path(model.folder).absolute()).encode()).hexdigest()[:16]
    try:
        return _with_config(home() / "drafters" / key, settings)
    except OSError as reason:
        if reason.errno not in READ_ONLY:
            raise
        return _with_config(temporary_home() / "drafters" / key, settings)


def _with_config(folder: Path, settings: dict[str, Any]) -> Path:
    """Returns a folder with the settings in its config.json, which is written unless it already has them."""
    path = folder / "config.json"
    if not path.is_file() or read_object(path, "the drafter's config") != settings:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    return folder
