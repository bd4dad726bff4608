"""A drafter from elsewhere into a run directory of its own, as if it had been trained here."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from medusa_cli import assets
from medusa_cli.errors import UserError
from medusa_cli.exporting import eagle3, hydra, medusa
from medusa_cli.exporting.imported import Base, Imported
from medusa_cli.exporting.tensors import check_tensors, inside, read_tensors
from medusa_cli.runs.accuracies import Calibrated
from medusa_cli.runs.files import replacing_folder, write_json
from medusa_cli.runs.lock import sole_writer
from medusa_cli.runs.reading import convert, read_object
from medusa_cli.runs.run import Run, check_backbone, provenance
from medusa_cli.tree.saved import TreeFile

# Where the layouts keep their weights, the safe form of each first.
FILES = ("medusa_lm_head", "hydra_lm_head", "model", "pytorch_model")
SUFFIXES = (".safetensors", ".pt", ".bin")
# What says which tokens a draft vocabulary has is no weight.
MAPS = ("draft_ids", "d2t", "t2d")
INDEX = "model.safetensors.index.json"
FORMATS = {"medusa": medusa.import_medusa, "hydra": hydra.import_hydra, "eagle3": eagle3.import_eagle3}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrived:
    """The run that an import wrote, the kind and heads of its drafter, the format it came in, and notes."""

    run: Run
    kind: str
    format: str
    heads: int
    calibrated: bool
    notes: tuple[str, ...]


def import_drafter(
    place: str, run: str | None = None, model: str | None = None, trust_remote_code: bool = False
) -> Arrived:
    """Read a folder, file or hub id in any known format and write runs/NAME (by default named after it).

    trust_remote_code lets Python files of the model's run, which its config may need. UserError, naming what is wrong,
    for a checkpoint that does not fit the model, and for a run that has a drafter.
    """
    folder, weights = _fetched(place)
    config = read_object(folder / "config.json", "the config") if (folder / "config.json").is_file() else {}
    beside = medusa.read_beside(folder)
    owner = model or config.get("base_model_name_or_path") or eagle3.verifier_of(config)
    if not isinstance(owner, str):
        raise UserError(f"{place} does not say which model its drafter is for", "give @model NAME, FOLDER or ID")
    base = base_of(owner, trust_remote_code)
    tensors = _tensors(folder, weights)
    format = _format(tensors, config, place)
    found = FORMATS[format](tensors, config, base, beside)
    check_config(found)
    target = Run.open(run or _name_of(place), create=True)
    with sole_writer(target.path, "medusa import", log.warning):
        if (target.drafter_dir / "config.json").is_file():
            raise UserError(f"{target.path} has a drafter already", "give another @run")
        _write(found, base, target, {"from": str(place), "format": format})
    heads = found.config.get("num_heads") or found.config["medusa_num_heads"]
    return Arrived(target, found.kind, format, heads, found.calibration is not None, found.notes)


def base_of(model: str, trust_remote_code: bool = False) -> Base:
    """The model of a name, by its config alone."""
    from medusa_cli.backbone.network import read_config

    config = read_config(model, trust_remote_code)
    return Base(model, config.model_type, config.hidden_size, config.vocab_size, config.num_hidden_layers)


def check_config(found: Imported) -> None:
    """UserError unless the tensors are those that the kind wants by its config, and what was measured is that."""
    import torch

    from medusa_cli.drafters import DRAFTERS

    if found.kind not in DRAFTERS:
        raise UserError(f"this version has no drafter of the kind {found.kind}", f"known are {', '.join(DRAFTERS)}")
    kind = DRAFTERS[found.kind]
    with torch.device("meta"):
        drafter = kind(convert(kind.read_config(found.config), kind.config_class, f"the {found.kind} drafter's config"))
    wanted = {name: tuple(weight.shape) for name, weight in drafter.named_weights().items()}
    weights = {name: one for name, one in found.tensors.items() if name not in MAPS}
    check_tensors(weights, wanted, f"the {found.kind} drafter")
    whole = [name for name, one in weights.items() if not one.is_floating_point()]
    if whole:
        raise UserError(f"the tensor {whole[0]} is of whole numbers", "give weights in a floating type")
    for measured, schema, what in ((found.calibration, Calibrated, "calibration"), (found.tree, TreeFile, "tree")):
        if measured is not None:
            convert(measured, schema, f"the {what} in {medusa.BESIDE}", f"delete {medusa.BESIDE} to import without it")


def _name_of(place: str) -> str:
    """What a run is named after a folder (its last part, links as they are called), a file or a hub id."""
    path = Path(os.path.abspath(Path(place).expanduser()))
    return path.stem if path.is_file() else path.name


def _fetched(place: str) -> tuple[Path, Path | None]:
    """The folder of a checkpoint, and its file where that was named; a hub id is fetched first."""
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
    wanted = [
        "config.json",
        medusa.BESIDE,
        medusa.NARROW,
        INDEX,
        *(f"{name}{suffix}" for name in FILES for suffix in SUFFIXES),
    ]
    return Path(snapshot_download(place, allow_patterns=[*wanted, "model-*.safetensors"])), None


def _tensors(folder: Path, weights: Path | None) -> dict[str, Tensor]:
    """All tensors of a checkpoint: of the file that was named, of the first known one, or of several by their index."""
    if weights is not None:
        return read_tensors(weights)
    for name in FILES:
        for suffix in SUFFIXES:
            if (folder / f"{name}{suffix}").is_file():
                return read_tensors(folder / f"{name}{suffix}")
    if (folder / INDEX).is_file():
        named = read_object(folder / INDEX, "the index").get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
            raise UserError(f"{folder / INDEX} has no weight_map", "fetch the checkpoint again")
        return _merged(read_tensors(inside(folder, one)) for one in sorted(set(named.values())))
    raise UserError(f"{folder} holds no weights", f"it needs one of {', '.join(FILES)} as {' or '.join(SUFFIXES)}")


def _merged(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: one for part in parts for name, one in part.items()}


def _format(tensors: dict[str, Tensor], config: dict[str, Any], place: str) -> str:
    """Whose layout this is, by the names of its tensors."""
    if any("midlayer." in name or name.startswith("layers.0.self_attn") for name in tensors):
        return "eagle3"
    if any(name.startswith("hydra_mlp.") for name in tensors) or "hydra_num_heads" in config:
        return "hydra"
    if any(medusa.KEY.fullmatch(medusa.plain_name(name)) for name in tensors):
        return "medusa"
    some = ", ".join(list(tensors)[:3])
    raise UserError(f"{place} is in no known layout (its tensors are {some}, ...)", f"known are {', '.join(FORMATS)}")


def _write(found: Imported, base: Base, target: Run, origin: dict[str, Any]) -> None:
    """Leave the drafter, and what was measured of it, in the run; the drafter at last, as it says that all is there."""
    from medusa_cli.drafters import DRAFTERS

    made = found.config.get("provenance")
    if not isinstance(made, dict) or not isinstance(made.get("backbone"), dict):
        made = provenance(base.identity, imported=origin)
    check_backbone(made["backbone"], base.identity, "the drafter")
    target.bind(base.identity)
    for path, measured in ((target.calibration_path, found.calibration), (target.tree_path, found.tree)):
        if measured is not None:
            write_json(path, measured)
    said = {"drafter": found.kind, "base_model_name_or_path": base.id}
    config = {**said, **found.config, "drafter": found.kind, "provenance": made}
    with replacing_folder(target.drafter_dir) as part:
        path = part / DRAFTERS[found.kind].weights_file
        # Tensors of one storage, as tied ones are, each get their own.
        own = {name: one.detach().clone(memory_format=contiguous_format) for name, one in found.tensors.items()}
        save_file(own, path)
        path.chmod(0o644)
        write_json(part / "config.json", config)
