"""Import of drafters that other tools trained: find the checkpoint's layout, check every tensor, write a run."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from medusa_cli import assets
from medusa_cli.drafters.io import DRAFTERS, weight_shapes
from medusa_cli.errors import UserError
from medusa_cli.export import eagle3_format as eagle3
from medusa_cli.export import medusa_format as medusa
from medusa_cli.export.tensors import check_tensors, count_notes, read_tensors
from medusa_cli.model.load import read_config
from medusa_cli.runs.io import convert, read_object, replacing_folder, write_json
from medusa_cli.runs.run import Run, provenance, sole_writer

SUFFIXES = (".safetensors", ".pt", ".bin")
# Names of weight files, the safe form of each first.
FILES = [f"{name}{end}" for name in ("medusa_lm_head", "hydra_lm_head", "model", "pytorch_model") for end in SUFFIXES]
INDEX = "model.safetensors.index.json"
HYDRA_KEY = re.compile(r"hydra_mlp\.(\d\d?)\.(\d\d?)\.(.+)")
log = logging.getLogger(__name__)


def import_drafter(
    place: str, run: str | None = None, model: str | None = None, trust_remote_code: bool = False
) -> tuple[Run, dict[str, Any], list[str]]:
    """Reads a folder, file or hub id in any known layout and writes runs/NAME, by default named after it.

    Returns the run, its drafter's kind and heads with the layout they came in, and notes on changes.

    trust_remote_code: run the Python files that the model's config may need. Raises UserError, naming the fault, for a
    checkpoint that does not fit the model, and for a run that has a drafter.
    """
    folder, files = _fetch(place)
    config = read_object(folder / "config.json", "the config") if (folder / "config.json").is_file() else {}
    owner = model or config.get("base_model_name_or_path") or eagle3.verifier_of(config)
    if not isinstance(owner, str):
        raise UserError(f"{place} does not name the model of its drafter", "give @model NAME, FOLDER or ID")
    base = read_config(owner, trust_remote_code)
    stored: dict[str, Tensor] = {}
    for file in files:
        stored |= read_tensors(file)
    format = _format(stored, config, place)
    name, read = FORMATS[format]
    kind = DRAFTERS[name]
    settings, tensors, notes = read(stored, config, base)
    ours = {"drafter": kind.name, "hidden_size": base.hidden_size, "vocab_size": base.vocab_size, **settings}
    parsed = convert(kind.read_config(ours), kind.config_class, f"the {kind.name} drafter's config")
    check_tensors({name: tensors[name] for name in tensors if name != "draft_ids"}, weight_shapes(kind, parsed))
    identity = {"id": owner, "architecture": base.model_type, "layers": base.num_hidden_layers}
    identity |= {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    target = Run.open(run or _run_name(place), create=True)
    with sole_writer(target.path, "medusa import"):
        if (target.drafter_dir / "config.json").is_file():
            raise UserError(f"{target.path} has a drafter already", "give another @run")
        target.bind(identity)
        source = provenance(identity, imported={"from": str(place), "format": format})
        with replacing_folder(target.drafter_dir) as part:
            path = part / kind.weights_file
            # Tensors that share memory, as tied ones do, each get their own.
            own = {name: tensor.detach().clone(memory_format=contiguous_format) for name, tensor in tensors.items()}
            save_file(own, path)
            path.chmod(0o644)
            write_json(part / "config.json", {"base_model_name_or_path": owner, **ours, "provenance": source})
    return target, {"drafter": kind.name, "format": format, "heads": parsed.num_heads}, notes


def _run_name(place: str) -> str:
    """Returns the run's name after a folder (its last part; links keep their own name), a file or a hub id."""
    path = Path(os.path.abspath(Path(place).expanduser()))
    return path.stem if path.is_file() else path.name


def _fetch(place: str) -> tuple[Path, list[Path]]:
    """Returns a checkpoint's folder and its files of weights; a hub id is downloaded first."""
    folder = Path(place).expanduser()
    if folder.is_file():
        if folder.suffix not in SUFFIXES:
            raise UserError(f"{place} is no {', '.join(SUFFIXES)} file", "give the checkpoint's folder or its weights")
        return folder.parent, [folder]
    if not folder.is_dir():
        if place.startswith((".", "/", "~")) or place.count("/") != 1:
            raise UserError(f"{place} does not exist", "give a folder, a file of weights, or a hub id OWNER/NAME")
        from huggingface_hub import snapshot_download

        assets.check_hub(place, named="PATH|ID")
        patterns = ["config.json", INDEX, "model-*.safetensors", *FILES]
        folder = Path(snapshot_download(place, allow_patterns=patterns))
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is not None:
        return folder, [file]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no weights", f"it needs one of {', '.join(FILES)}")
    names = read_object(folder / INDEX, "the index").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{folder / INDEX} has no weight_map", "fetch the checkpoint again")
    return folder, [_inside(folder, name) for name in sorted(set(names.values()))]


def _inside(folder: Path, name: str) -> Path:
    """Returns the path of a file that an index names; raises UserError unless it lies in the folder."""
    path, root = (folder / name).resolve(), folder.resolve()
    if root.parent.name == "snapshots":  # in the hub's cache files are links to its blobs
        root = root.parents[1]
    if not path.is_relative_to(root):
        raise UserError(f"{folder} names the file {name!r} outside of itself", "do not trust this folder")
    return folder / name


def _format(tensors: dict[str, Tensor], config: dict[str, Any], place: str) -> str:
    """Returns the name of the layout that a checkpoint's tensors have."""
    if any("midlayer." in name or name.startswith("layers.0.self_attn") for name in tensors):
        return "eagle3"
    if any(name.startswith("hydra_mlp.") for name in tensors) or "hydra_num_heads" in config:
        return "hydra"
    if any(medusa.KEY.fullmatch(medusa.plain_name(name)) for name in tensors):
        return "medusa"
    some = ", ".join(list(tensors)[:3])
    raise UserError(f"{place} is in no known layout (its tensors are {some}, ...)", f"known are {', '.join(FORMATS)}")


def import_hydra(
    tensors: dict[str, Tensor], config: dict[str, Any], model: Any
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads Hydra heads as the authors' code saves them: settings, tensors, notes; UserError for other architectures.

    Biases of the vocabulary matrices are left out, with a note.
    """
    arch = config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or any(name.startswith("prefix_embeding_layer.") for name in tensors):
        raise UserError(f"hydra_head_arch={arch!r} cannot be run here", "give heads of the kind mlp")
    if config.get("hidden_state_offset"):
        raise UserError("hidden_state_offset: these heads read an earlier layer", "give heads on the final states")
    keys = [key for name in tensors if (key := HYDRA_KEY.fullmatch(name)) and key[3] == "linear.weight"]
    if not keys:
        raise UserError("the checkpoint has no tensors named hydra_mlp.HEAD.LAYER.linear.weight", "give Hydra heads")
    if "hydra_mlp.0.0.res_connection.weight" not in tensors:
        raise UserError("grounded_heads=false: these heads do not see earlier draft tokens", "give grounded heads")
    heads, layers = 1 + max(int(key[1]) for key in keys), 1 + max(int(key[2]) for key in keys)
    notes = count_notes(config.get("hydra_num_heads"), heads)
    names = {}  # theirs -> ours
    for k in range(heads):
        names[f"hydra_lm_head.{k}.weight"] = f"matrices.{k}"
        for end in ("weight", "bias"):
            names[f"hydra_mlp.{k}.0.res_connection.{end}"] = f"blocks.{k}.skip.{end}"
            names[f"hydra_mlp.{k}.0.linear.{end}"] = f"blocks.{k}.mix.{end}"
            for layer in range(1, layers):
                names[f"hydra_mlp.{k}.{layer}.linear.{end}"] = f"blocks.{k}.stack.{layer - 1}.linear.{end}"
    tensors = dict(tensors)
    tensors.pop("input_embed_fn.weight", None)  # the model's own
    biases = [tensors.pop(f"hydra_lm_head.{k}.bias", None) for k in range(heads)]
    known = [bias for bias in biases if bias is not None and bias.shape == (model.vocab_size,)]
    largest = max((bias.float().abs().max().item() for bias in known), default=0)
    if largest:
        notes.append(f"the biases of the vocabulary matrices, at most {largest:.2g}, are left out")
    settings = {"num_heads": heads, "num_layers": layers, "vocabulary": "own", "raw": True}
    return settings, {names.get(name, name): tensor for name, tensor in tensors.items()}, notes


# The kind of drafter that each layout holds, and its reader.
FORMATS = {
    "medusa": ("medusa", medusa.import_medusa),
    "hydra": ("hydra", import_hydra),
    "eagle3": ("eagle", eagle3.import_eagle3),
}
