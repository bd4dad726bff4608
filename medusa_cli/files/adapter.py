"""LoRA adapters as peft saves them: their config, their weights, and their merge into a model's files."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from medusa_cli.errors import UserError, first_line, listed, shown
from medusa_cli.files.io import AGAIN, convert, read_object
from medusa_cli.files.safetensors_files import OTHER_WEIGHTS, read_weights

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
WHAT = "the adapter's weights"
# The names of the two matrices whose product is added to a layer's weight.
LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
MERGE = "merge it into its model with peft, and give the merged model as @model"
# Endings of the names of a model's files that are copied as they are. Weights are merged instead.
COPIED = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
# Parts of the names of a tokenizer's files, which trainers save next to an adapter.
OF_TOKENIZER = ("token", "vocab", "spiece", "tekken", "merges", "chat_template")

# Keys in a saved adapter's config that do not change the meaning of its weights. Keys that are neither
# here nor in `AdapterConfig` must be empty or false.
NOT_READ = (
    *("task_type", "auto_mapping", "peft_version", "revision", "target_modules"),
    *("inference_mode", "lora_dropout", "megatron_config", "megatron_core"),
    *("layers_to_transform", "layers_pattern", "exclude_modules"),
    *("qalora_group_size", "eva_config", "ensure_weight_tying"),
)


@dataclass(frozen=True)
class AdapterConfig:
    """Holds the keys that are read from a saved adapter's config. Only plain LoRA of one rank is valid.

    The adapter changes the layers for which its file has weights. init_lora_weights: values that are
    not declared here change the model's own weights, too. use_rslora: scale by alpha / sqrt(r), not by
    alpha / r. fan_in_fan_out: the model stores its weights transposed.
    """

    peft_type: Literal["LORA"]
    r: Annotated[int, Meta(ge=1, le=65_536)]
    lora_alpha: Annotated[float, Meta(ge=0, le=1e6)]
    base_model_name_or_path: str | None = None
    bias: Literal["none"] = "none"
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] = True

    @property
    def scale(self) -> float:
        """Returns the factor by which the product of the two matrices is multiplied."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


def is_adapter(folder: Path) -> bool:
    """Returns True for a folder with an adapter and without a model's weights."""
    return (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors*"))


def read_config(folder: Path) -> AdapterConfig:
    """Reads an adapter's config; raises UserError for an adapter that is more than plain LoRA."""
    path = folder / CONFIG
    document = read_object(path, "the adapter's config")
    known = convert(document, AdapterConfig, f"the adapter's config {path}", AGAIN)
    for key in sorted({*document} - {*vars(known)} - {*NOT_READ}):
        if document[key] not in (None, False, {}, []):
            fault = f"the adapter's config {path} sets {key} {shown(document[key])}: it is more than plain LoRA"
            raise UserError(fault, MERGE)
    return known


def weights_in(folder: Path) -> Path:
    """Returns the file of an adapter's weights; raises UserError if the folder has none."""
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    others = [path.name for path in sorted(folder.glob("*")) if path.suffix in OTHER_WEIGHTS]
    if others:
        fault = f"the adapter {folder} holds no {WEIGHTS}, only {listed(others)}"
        raise UserError(fault, f"save it there in peft's layout, as safetensors, or {MERGE}")
    raise UserError(f"{folder} holds no adapter", "train one with `medusa train --stage 2`")


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the tokenizer in an adapter's folder."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and any(word in path.name for word in OF_TOKENIZER)
    ]


def merge_files(folder: Path, base: Path, checkpoint: Sequence[Path], part: Path) -> None:
    """Merges the adapter in `folder` into the model in `base`, and writes the result to `part`, file by file.

    checkpoint: the safetensors files of the base. The sums are rounded to the type in which the base
    stores its weights, as peft does. Raises UserError for an adapter that does not fit the model.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    changes = _read_changes(folder)
    part.mkdir(parents=True)
    missing = {*changes}
    try:
        for file in checkpoint:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            for name in tensors.keys() & changes.keys():
                tensors[name] = _changed(folder, name, tensors[name], changes[name])
            missing -= {*tensors}
            save_file(tensors, part / file.name, metadata={"format": "pt"})
    except SafetensorError as reason:
        raise UserError(f"the model {base} is damaged: {first_line(reason)}", AGAIN) from reason
    if missing:
        raise _misfit(folder, f"the files of {base} have no tensor {listed(sorted(missing))}")
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix in COPIED:
            shutil.copyfile(path, part / path.name)
    for path in tokenizer_files(folder):
        shutil.copyfile(path, part / path.name)


def _read_changes(folder: Path) -> "dict[str, Tensor]":
    """Returns the matrix that an adapter adds to each weight, by the weight's name."""
    config = read_config(folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_weights(weights_in(folder), WHAT).items():
        found = LORA.fullmatch(name)
        if found is None:
            raise _misfit(folder, f"its weights hold the tensor {name}, which is not plain LoRA")
        halves.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor.float()
    changes = {}
    for name, half in halves.items():
        shapes = {key: tuple(tensor.shape) for key, tensor in half.items()}
        if {*half} != {"A", "B"} or (shapes["A"][0], shapes["B"][-1]) != (config.r, config.r):
            raise _misfit(
                folder, f"its matrices of {name} have the shapes {shapes}, with r = {config.r}"
            )
        change = config.scale * (half["B"] @ half["A"])
        changes[name] = change.T if config.fan_in_fan_out else change
    return changes


def _changed(folder: Path, name: str, weight: "Tensor", change: "Tensor") -> "Tensor":
    """Returns the sum of a weight and its change, in the weight's type."""
    if weight.shape != change.shape or not weight.is_floating_point() or weight.itemsize < 2:
        kind = f"the shape {[*weight.shape]} and the type {weight.dtype}"
        raise _misfit(folder, f"{name} has {kind}, and its change the shape {[*change.shape]}")
    return (weight.float() + change).to(weight.dtype)


def _misfit(folder: Path, fault: str) -> UserError:
    return UserError(f"the adapter {folder} does not fit the model: {fault}", MERGE)
