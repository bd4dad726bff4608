"""The import of other tools' drafters, which detects a checkpoint's layout and checks every tensor."""

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_cli.drafters import incoming_assistant as assistant
from medusa_cli.drafters import incoming_dflash as dflash
from medusa_cli.drafters import incoming_eagle3 as eagle3
from medusa_cli.drafters import incoming_medusa as medusa
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.incoming_eagle3 import AGAIN
from medusa_cli.drafters.kinds import DRAFTERS, weight_shapes
from medusa_cli.errors import UserError, first_line, listed, shown
from medusa_cli.files.hub import hub_folder
from medusa_cli.files.io import convert, read_as, read_object, restore
from medusa_cli.files.model_files import check_shards, fault_of
from medusa_cli.files.model_source import WEIGHTS, Shards
from medusa_cli.files.paths import expanded
from medusa_cli.files.safetensors_files import FLOATS, INTEGERS, read_weights
from medusa_cli.runs.run import few_positions, verifier_of

SUFFIXES = (".safetensors", ".pt", ".bin")
# Names of weight files; for each name, the safe format comes first.
HEAD_FILES = [f"{name}{end}" for name in ("medusa_lm_head", "hydra_lm_head") for end in SUFFIXES]
FILES = HEAD_FILES + [f"{name}{end}" for name in ("model", "pytorch_model") for end in SUFFIXES]
INDEX = WEIGHTS[1]
# Config keys that state the number of heads.
COUNTS = ("medusa_num_heads", "hydra_num_heads", "num_heads")
HYDRA_KEY = re.compile(r"hydra_mlp\.(\d\d?)\.(\d\d?)\.(.+)")
# Maximum number of faults listed in an error, and dtypes that a torch file may hold.
LISTED = 4
TYPES = {
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.bool,
}


@dataclass(frozen=True)
class Incoming:
    """Holds a checkpoint's drafter in the form in which it runs here.

    kind, config: the drafter's class and config. settings: the config in the form of config.json. tensors: by our
    names. format: the checkpoint's layout. notes: a text for each way in which the drafter differs from the checkpoint.
    """

    format: str
    kind: type[HeadDrafter]
    config: Any
    settings: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)
    notes: list[str]


@dataclass(frozen=True)
class Checkpoint:
    """Holds the config and all tensors of a folder, a file or a hub repository that another tool wrote."""

    place: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, place: str) -> "Checkpoint":
        """Reads a checkpoint; raises UserError for files that are missing, damaged or malicious."""
        folder, files, shards = _fetch(place)
        path = folder / "config.json"
        tensors: dict[str, Tensor] = {}
        for file in files:
            own = read_tensors(file)
            tensors |= {
                name: tensor
                for name, tensor in own.items()
                if shards.get(name, file.name) == file.name
            }
        lost = sorted({*shards} - {*tensors})
        if lost:
            fault = f"{folder / shards[lost[0]]} lacks {len(lost)} tensors that {INDEX} names, such as {shown(lost[0])}"
            raise UserError(fault, AGAIN)
        config = read_object(path, "the config") if path.is_file() else {}
        return cls(place, config, tensors, tuple(_left_out(folder, files)))

    @property
    def model(self) -> Any:
        """Returns the drafter's base model as named in the config, or None if the config names none."""
        return self.config.get("base_model_name_or_path") or verifier_of(self.config)

    @property
    def kind(self) -> type[HeadDrafter]:
        """Returns the class of the drafter; raises UserError for an unknown layout."""
        return DRAFTERS[FORMATS[_format(self.tensors, self.config, self.place)][0]]

    def read(self, base: Any, vocab_size: int) -> Incoming:
        """Returns the drafter for a model with the config `base`; raises UserError if it does not fit the model."""
        format = _format(self.tensors, self.config, self.place)
        kind = self.kind
        settings, tensors, notes = FORMATS[format][1](self.tensors, self.config, base)
        settings = {
            "drafter": kind.name,
            "hidden_size": base.hidden_size,
            "vocab_size": vocab_size,
            **settings,
        }
        config = convert(
            kind.read_config(settings), kind.config_class, f"the {kind.name} drafter's config"
        )
        notes += [*self.notes, *_count_notes(self.config, config.num_heads)]
        positions = eagle3.flat(self.config).get("max_position_embeddings")
        if isinstance(positions, int) and positions < base.max_position_embeddings:
            notes.append(few_positions(positions, base.max_position_embeddings))
            settings["max_position_embeddings"] = positions
        check_tensors(
            {name: tensors[name] for name in tensors if name != "draft_ids"},
            weight_shapes(kind, config),
            self.place,
        )
        return Incoming(format, kind, config, settings, tensors, notes)


def _count_notes(config: dict[str, Any], heads: int) -> list[str]:
    """Returns a note if a config states fewer heads than the file holds; raises UserError if the config states more."""
    stated = next((config[key] for key in COUNTS if isinstance(config.get(key), int)), heads)
    if stated > heads:
        fault = f"config.json counts {stated} heads, the file holds {heads}"
        raise UserError(fault, AGAIN)
    if stated == heads:
        return []
    return [f"config.json counts {stated} heads, the file holds {heads}: all are imported"]


def _left_out(folder: Path, files: Sequence[Path]) -> list[str]:
    """Returns a note on the weight files of a folder that are not read."""
    others = [folder / name for name in FILES if (folder / name).is_file()]
    names = [path.name for path in others if path not in files]
    if not names or not any(folder == path.parent for path in files):
        return []
    source = INDEX if len(files) > 1 or files[0].name not in FILES else files[0].name
    return [f"{listed(names)} next to {source}: left out"]


def _fetch(place: str) -> tuple[Path, list[Path], dict[str, str]]:
    """Returns a checkpoint's folder, its weight files, and the file of each tensor if there is an index.

    A hub id is downloaded first.
    """
    folder = expanded(place)
    restore(folder)
    if folder.is_file():
        if folder.suffix not in SUFFIXES:
            fault = f"{place} is not a {', '.join(SUFFIXES)} file"
            raise UserError(fault, "give the checkpoint's folder or its weights")
        return folder.parent, [folder], {}
    if not folder.is_dir():
        if place.startswith((".", "/", "~")) or place.count("/") != 1:
            fault = f"{place} does not exist"
            raise UserError(fault, "give a folder, a file of weights, or a hub id OWNER/NAME")
        patterns = ["config.json", INDEX, "model-*.safetensors", *FILES]
        folder = hub_folder(place, patterns, "PATH|ID")
    # An index next to files of heads may belong to a whole model.
    if (folder / INDEX).is_file() and not any((folder / name).is_file() for name in HEAD_FILES):
        index = read_as(folder / INDEX, Shards, "the index", AGAIN).weight_map
        for name in set(index.values()):
            _inside(folder, name)
        check_shards(folder, INDEX, index.values(), AGAIN)
        return folder, [folder / name for name in sorted(set(index.values()))], index
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds no weights", f"it needs one of {', '.join(FILES)}")
    return folder, [file], {}


def _inside(folder: Path, name: str) -> Path:
    """Returns the path of a file named in an index; raises UserError unless it is inside the folder."""
    path = (folder / name).resolve()
    root = folder.resolve()
    if root.parent.name == "snapshots":  # in the hub's cache, files are links to blobs
        root = root.parents[1]
    if not path.is_relative_to(root):
        fault = f"{folder} names the file {name!r} outside of itself"
        raise UserError(fault, "do not trust this folder")
    return folder / name


def _format(tensors: dict[str, Tensor], config: dict[str, Any], place: str) -> str:
    """Returns the name of a checkpoint's layout, based on its tensors and config.

    Raises UserError for an unknown layout.
    """
    kind = config.get("speculators_model_type")
    if config.get("model_type") in assistant.TYPES:
        return "assistant"
    if kind in dflash.TYPES:
        return "dflash"
    if kind not in (None, "eagle3"):
        fault = f"{place} is a drafter {shown(kind)} of speculators, which cannot be run here"
        raise UserError(fault, f"known are eagle3, {', '.join(dflash.TYPES)}")
    if any("midlayer." in name or name.startswith("layers.0.self_attn") for name in tensors):
        return "eagle3"
    if any(name.startswith("hydra_mlp.") for name in tensors) or "hydra_num_heads" in config:
        return "hydra"
    if any(medusa.KEY.fullmatch(medusa.plain_name(name)) for name in tensors):
        return "medusa"
    some = ", ".join(list(tensors)[:3])
    fault = f"{place} is in no known layout (its tensors are {some}, ...)"
    raise UserError(fault, f"use one of {', '.join(FORMATS)}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors file, or of a torch file (.pt, .bin) without executing its pickle.

    Raises UserError for any other file, and for a file that holds more than tensors.
    """
    if path.suffix == ".safetensors":
        fault = fault_of(path) if path.is_file() else None
        if fault is not None:
            raise UserError(f"{path} {fault}", AGAIN)
        return read_weights(path, "the checkpoint", types=(*FLOATS, *INTEGERS, "I8", "BOOL"))
    try:
        _check_uncompressed(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as reason:
        raise UserError(
            f"{path} holds pickled objects besides tensors, whose loading could run code; it was not read",
            "if you trust it, load it elsewhere and save its tensors as .safetensors",
        ) from reason
    except UserError:
        raise
    except Exception as reason:  # damaged files raise errors of a dozen types
        raise UserError(
            f"{path} is not a complete torch file: {first_line(reason)}", "fetch it again"
        ) from reason
    if not isinstance(tensors, Mapping) or not all(map(_is_named_tensor, tensors.items())):
        raise UserError(
            f"{path} is not a state dict of named tensors",
            "give the file with the heads' state dict",
        )
    for name, tensor in tensors.items():
        if (
            tensor.layout != torch.strided
            or tensor.device.type != "cpu"
            or tensor.dtype not in TYPES
        ):
            raise UserError(
                f"{path}: the tensor {shown(name)} is sparse or quantized",
                "save it as plain floats",
            )
    return dict(tensors)


def _is_named_tensor(entry: tuple[Any, Any]) -> bool:
    name, tensor = entry
    return isinstance(name, str) and isinstance(tensor, Tensor)


def _check_uncompressed(path: Path) -> None:
    """Raises UserError for a compressed torch file.

    torch does not compress its files, and a compressed file may expand without limit.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            fault = f"{path} is a compressed archive; torch files are not compressed"
            raise UserError(fault, "save it again with torch.save")


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], place: str
) -> None:
    """Raises UserError, listing the faults, unless the tensors have exactly these names and shapes.

    The tensors must also hold finite floats. place: the checkpoint's folder, file or hub id.
    """
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in shapes]
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            faults.append(f"{name} is {_size(tensors[name].shape)} instead of {_size(shape)}")
    # Values are checked last: a tensor of another shape may be too large to check.
    if not faults:
        faults = [
            f"{name} holds integers" for name in tensors if not tensors[name].is_floating_point()
        ]
    if not faults:
        faults = [f"{name} is not finite" for name in tensors if not tensors[name].isfinite().all()]
    if faults:
        more = f" and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        text = f"the checkpoint {place} does not fit the model: {'; '.join(faults[:LISTED])}{more}"
        raise UserError(text, "give the drafter's own @model, or fetch the checkpoint again")


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def read_hydra(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads Hydra heads as saved by the authors' code; returns settings, tensors and notes.

    Raises UserError for other architectures. Biases of the vocabulary matrices are left out, with a note.
    """
    arch = config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or any(name.startswith("prefix_embeding_layer.") for name in tensors):
        fault = f"hydra_head_arch={arch!r} cannot be run here"
        raise UserError(fault, "give heads of the kind mlp")
    if config.get("hidden_state_offset"):
        fault = "hidden_state_offset: these heads read an earlier layer"
        raise UserError(fault, "give heads on the final states")
    keys = [
        key for name in tensors if (key := HYDRA_KEY.fullmatch(name)) and key[3] == "linear.weight"
    ]
    if not keys:
        fault = "the checkpoint has no tensors named hydra_mlp.HEAD.LAYER.linear.weight"
        raise UserError(fault, "give Hydra heads")
    if "hydra_mlp.0.0.res_connection.weight" not in tensors:
        fault = "grounded_heads=false: these heads do not see earlier draft tokens"
        raise UserError(fault, "give grounded heads")
    heads = 1 + max(int(key[1]) for key in keys)
    layers = 1 + max(int(key[2]) for key in keys)

    notes = []
    names = {}  # theirs -> ours
    for k in range(heads):
        names[f"hydra_lm_head.{k}.weight"] = f"matrices.{k}"
        for end in ("weight", "bias"):
            names[f"hydra_mlp.{k}.0.res_connection.{end}"] = f"blocks.{k}.skip.{end}"
            names[f"hydra_mlp.{k}.0.linear.{end}"] = f"blocks.{k}.mix.{end}"
            for layer in range(1, layers):
                names[f"hydra_mlp.{k}.{layer}.linear.{end}"] = (
                    f"blocks.{k}.stack.{layer - 1}.linear.{end}"
                )

    tensors = dict(tensors)
    tensors.pop("input_embed_fn.weight", None)  # the model's embeddings are used
    biases = [tensors.pop(f"hydra_lm_head.{k}.bias", None) for k in range(heads)]
    known = [bias for bias in biases if bias is not None and bias.shape == (model.vocab_size,)]
    largest = max((bias.float().abs().max().item() for bias in known), default=0)
    if largest:
        notes.append(f"the biases of the vocabulary matrices, at most {largest:.2g}, are left out")
    settings = {"num_heads": heads, "num_layers": layers, "vocabulary": "own", "raw": True}
    return settings, {names.get(name, name): tensor for name, tensor in tensors.items()}, notes


# For each layout, the kind of its drafters and the function that reads a checkpoint.
FORMATS = {
    "medusa": ("medusa", medusa.read_medusa),
    "hydra": ("hydra", read_hydra),
    "eagle3": ("eagle", eagle3.read_eagle3),
    "dflash": ("dflash", dflash.read_dflash),
    "assistant": ("assistant", assistant.read_assistant),
}
