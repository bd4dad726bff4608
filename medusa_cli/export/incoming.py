"""Import of drafters that other tools trained: find the checkpoint's layout, check every tensor, write a run."""

import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from medusa_cli import assets
from medusa_cli.drafters import DRAFTERS
from medusa_cli.errors import UserError
from medusa_cli.export import eagle3_format as eagle3
from medusa_cli.export import medusa_format as medusa
from medusa_cli.export.tensors import Base, check_tensors, count_notes, inside, read_tensors, weight_shapes
from medusa_cli.model.load import read_config
from medusa_cli.runs.io import convert, read_object, replacing_folder, write_json
from medusa_cli.runs.run import Run, provenance, sole_writer

# Names of weight files, the safe form of each first.
FILES = ("medusa_lm_head", "hydra_lm_head", "model", "pytorch_model")
SUFFIXES = (".safetensors", ".pt", ".bin")
INDEX = "model.safetensors.index.json"
# Tensors that name the tokens of a draft vocabulary; the layouts check them themselves.
MAPS = ("draft_ids", "d2t")
HYDRA_KEY = re.compile(r"hydra_mlp\.(\d\d?)\.(\d\d?)\.(.+)")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportedDrafter:
    """The run that an import wrote, its drafter's kind and heads, the layout it came in, notes on what was changed."""

    run: Run
    kind: str
    format: str
    heads: int
    notes: list[str]


def import_drafter(
    place: str, run: str | None = None, model: str | None = None, trust_remote_code: bool = False
) -> ImportedDrafter:
    """Reads a folder, file or hub id in any known layout and writes runs/NAME, by default named after it.

    trust_remote_code: run the Python files that the model's config may need. UserError, naming what is wrong, for a
    checkpoint that does not fit the model, and for a run that has a drafter.
    """
    folder, weights = _fetched(place)
    config = read_object(folder / "config.json", "the config") if (folder / "config.json").is_file() else {}
    owner = model or config.get("base_model_name_or_path") or eagle3.verifier_of(config)
    if not isinstance(owner, str):
        raise UserError(f"{place} does not name the model of its drafter", "give @model NAME, FOLDER or ID")
    its = read_config(owner, trust_remote_code)
    base = Base(owner, its.model_type, its.hidden_size, its.vocab_size, its.num_hidden_layers)
    stored = _stored_tensors(folder, weights)
    format = _format(stored, config, place)
    ours, tensors, notes = FORMATS[format](stored, config, base)
    kind = DRAFTERS[ours["drafter"]]
    parsed = convert(kind.read_config(ours), kind.config_class, f"the {kind.name} drafter's config")
    floats = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    check_tensors(floats, weight_shapes(kind, parsed), f"the checkpoint ({format})")
    integers = [name for name, tensor in floats.items() if not tensor.is_floating_point()]
    if integers:
        raise UserError(f"the tensor {integers[0]} holds integers", "give weights of a floating type")
    target = Run.open(run or _run_name(place), create=True)
    with sole_writer(target.path, "medusa import", log.warning):
        if (target.drafter_dir / "config.json").is_file():
            raise UserError(f"{target.path} has a drafter already", "give another @run")
        target.bind(asdict(base))
        made = provenance(asdict(base), imported={"from": str(place), "format": format})
        with replacing_folder(target.drafter_dir) as part:
            path = part / kind.weights_file
            # Tensors that share memory, as tied ones do, each get their own.
            own = {name: tensor.detach().clone(memory_format=contiguous_format) for name, tensor in tensors.items()}
            save_file(own, path)
            path.chmod(0o644)
            write_json(part / "config.json", {"base_model_name_or_path": base.id, **ours, "provenance": made})
    return ImportedDrafter(target, kind.name, format, parsed.num_heads, notes)


def _run_name(place: str) -> str:
    """Returns the run's name after a folder (its last part; links keep their own name), a file or a hub id."""
    path = Path(os.path.abspath(Path(place).expanduser()))
    return path.stem if path.is_file() else path.name


def _fetched(place: str) -> tuple[Path, Path | None]:
    """Returns a checkpoint's folder, and its file if that was named; a hub id is downloaded first."""
    path = Path(place).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path} is no {', '.join(SUFFIXES)} file", "give the checkpoint's folder or its weights")
        return path.parent, path
    if path.is_dir():
        return path, None
    if place.startswith((".", "/", "~")) or place.count("/") != 1:
        raise UserError(f"{place} does not exist", "give a folder, a file of weights, or a hub id OWNER/NAME")
    from huggingface_hub import snapshot_download

    assets.check_hub(place, named="PATH|ID")
    names = [f"{name}{suffix}" for name in FILES for suffix in SUFFIXES]
    return Path(snapshot_download(place, allow_patterns=["config.json", INDEX, "model-*.safetensors", *names])), None


def _stored_tensors(folder: Path, weights: Path | None) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint: of the file that was named, of the first known one, or of an index."""
    if weights is not None:
        return read_tensors(weights)
    for path in (folder / f"{name}{suffix}" for name in FILES for suffix in SUFFIXES):
        if path.is_file():
            return read_tensors(path)
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no weights", f"it needs one of {', '.join(FILES)} as {' or '.join(SUFFIXES)}")
    files = read_object(folder / INDEX, "the index").get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{folder / INDEX} has no weight_map", "fetch the checkpoint again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        tensors |= read_tensors(inside(folder, name))
    return tensors


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
    tensors: dict[str, Tensor], config: dict[str, Any], base: Base
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Reads Hydra heads as the authors' code saves them: config, tensors, notes; UserError for other architectures.

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
    notes = count_notes(config, ("hydra_num_heads",), heads)
    names = {"input_embed_fn.weight": ""}  # theirs -> ours; "" for what is left out
    for k in range(heads):
        for end in ("weight", "bias"):
            names[f"hydra_mlp.{k}.0.res_connection.{end}"] = f"blocks.{k}.skip.{end}"
            names[f"hydra_mlp.{k}.0.linear.{end}"] = f"blocks.{k}.mix.{end}"
            for layer in range(1, layers):
                names[f"hydra_mlp.{k}.{layer}.linear.{end}"] = f"blocks.{k}.stack.{layer - 1}.linear.{end}"
        names[f"hydra_lm_head.{k}.weight"], names[f"hydra_lm_head.{k}.bias"] = f"matrices.{k}", ""
    biases = [tensor for name, tensor in tensors.items() if name.endswith(".bias") and names.get(name) == ""]
    largest = max((bias.float().abs().max().item() for bias in biases if bias.shape == (base.vocab_size,)), default=0)
    if largest:
        notes.append(f"the biases of the vocabulary matrices, at most {largest:.2g}, are left out")
    ours = {
        "drafter": "hydra",
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
    renamed = {names.get(name, name): tensor for name, tensor in tensors.items() if names.get(name) != ""}
    return ours, renamed, notes


FORMATS = {"medusa": medusa.import_medusa, "hydra": import_hydra, "eagle3": eagle3.import_eagle3}
