"""Reads and writes drafter folders."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.drafters.firp import check_extra_rows
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.incoming import Checkpoint, check_tensors
from medusa_cli.drafters.kinds import DRAFTERS, REMEDY, Uninitialized, weight_shapes
from medusa_cli.engine.packed_drafter import PackedDrafter
from medusa_cli.errors import UserError, shown
from medusa_cli.files.io import convert, read_object, write_json
from medusa_cli.files.safetensors_files import SCALE, read_weights, to_int8
from medusa_cli.model import Backbone
from medusa_cli.runs.run import DRAFTER_CONFIG, check_backbone, describe_drafter, same

log = logging.getLogger(__name__)
# A config from another tool has one of these keys.
FOREIGN = {
    "speculators_model_type",
    "model_type",
    "architectures",
    "medusa_num_heads",
    "hydra_num_heads",
}


def is_foreign(folder: Path) -> bool:
    """Returns True if the config in a folder comes from another tool."""
    config = read_object(Path(folder) / "config.json", DRAFTER_CONFIG)
    return "drafter" not in config and not FOREIGN.isdisjoint(config)


def drafter_kind(folder: Path) -> type[HeadDrafter]:
    """Returns the class of the drafter in a folder; raises UserError if the folder holds no known drafter."""
    name = describe_drafter(folder).drafter
    if is_foreign(folder):
        return Checkpoint.open(str(folder)).kind
    if name not in DRAFTERS:
        fault = f"{folder} holds no known drafter ({shown(name)})"
        raise UserError(fault, f"use one of {', '.join(DRAFTERS)}")
    return DRAFTERS[name]


def load_drafter(folder: Path, backbone: Backbone) -> HeadDrafter:
    """Loads the drafter in a folder.

    A checkpoint from another tool is read directly. Raises UserError, naming both models, if the drafter was trained
    for a backbone of another shape or with another adapter. Logs a warning if only the weights differ. If the model's
    packed weights are kept in a file, the drafter's packed weights are kept as well.
    """
    foreign = is_foreign(folder)
    backbone_file = backbone.engine.packed_path
    kept = None if backbone_file is None else PackedDrafter.of(folder, backbone_file)
    drafter = load_incoming(folder, backbone) if foreign else _load_own(folder, backbone)
    # The weights of an MTP layer may be in a model's files, whose changes `kept` would not notice.
    if foreign or (folder / drafter.weights_file).is_file():
        drafter.kept = kept
    return drafter


@cache
def _warn_once(text: str) -> None:
    """Logs a warning, unless this process has already logged it."""
    log.warning(text)


def _load_own(folder: Path, backbone: Backbone) -> HeadDrafter:
    """Loads a drafter that `medusa train` or `medusa import` wrote; raises what `load_drafter` raises."""
    kind = drafter_kind(folder)
    identity = describe_drafter(folder).provenance.identity
    if identity:
        check_backbone(identity, backbone.identity, f"the drafter in {folder}", tuned=True)
        adapter = identity.get("adapter")
        if adapter not in (None, backbone.adapter):
            loaded = f"adapter {backbone.adapter}" if backbone.adapter else "no adapter"
            fault = f"the drafter in {folder} was trained with adapter {adapter}, the model was loaded with {loaded}"
            raise UserError(fault, "give the @run that holds drafter and adapter together")
        if adapter != backbone.adapter or not same(identity, backbone.identity, "weights"):
            _warn_once(
                f"the drafter in {folder} was trained on other weights than those of {backbone.id}, which accepts "
                "fewer of its drafts; `medusa distill` and `medusa train --from` adapt it"
            )
    drafter = load_kind(kind, folder, backbone)
    if drafter.uses_verify_pass:
        check_extra_rows(backbone)
    return drafter


def load_kind(kind: type[HeadDrafter], folder: Path, backbone: Backbone) -> HeadDrafter:
    """Reads a drafter of a known kind in the backbone's dtype, ready to draft.

    Raises UserError for unusable files.
    """
    config, tensors = read_drafter(kind, folder)
    if (config.hidden_size, config.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
        raise UserError(
            f"the drafter in {folder} is for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, "
            f"the model {backbone.id!r} has {backbone.hidden_size} and {backbone.vocab_size}",
            "give the drafter's own @model or another @drafter",
        )
    return fill_drafter(kind, config, tensors, backbone)


def load_incoming(folder: Path, backbone: Backbone) -> HeadDrafter:
    """Loads the checkpoint of another tool; raises UserError if it does not fit the model."""
    drafter = Checkpoint.open(str(folder)).read(backbone.config, backbone.vocab_size)
    for note in drafter.notes:
        log.info("%s: %s", folder, note)
    return fill_drafter(drafter.kind, drafter.config, drafter.tensors, backbone)


def fill_drafter(
    kind: type[HeadDrafter], config: Any, tensors: dict[str, Tensor], backbone: Backbone
) -> HeadDrafter:
    """Returns a drafter with the tensors from its file, in the backbone's dtype, ready to draft."""
    kind.check_fit(config, backbone)
    with Uninitialized():
        drafter = kind(config)
    with torch.no_grad():
        for name, weight in drafter.named_weights().items():
            weight.copy_(tensors[name])
    if config.vocabulary == "draft":
        drafter.draft_ids.copy_(tensors["draft_ids"])
    return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


def read_drafter(kind: type[HeadDrafter], folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Reads the config and the tensors from a drafter's files.

    Raises UserError for files that do not fit each other.
    """
    path = Path(folder) / "config.json"
    data = read_object(path, DRAFTER_CONFIG)
    config = convert(kind.read_config(data), kind.config_class, f"{DRAFTER_CONFIG} {path}", REMEDY)
    model = data.get("base_model_name_or_path")
    elsewhere = kind.weights_elsewhere(Path(folder), model if isinstance(model, str) else None)
    if elsewhere is not None:
        check_tensors(elsewhere, weight_shapes(kind, config), str(model))
        return config, elsewhere
    ids = {"draft_ids": (config.draft_vocab_size or 0,)} if config.vocabulary == "draft" else {}
    weights = Path(folder) / kind.weights_file
    tensors = read_weights(weights, "the drafter's weights", weight_shapes(kind, config), ids)
    if ids:
        known = tensors["draft_ids"]
        if known.min() < 0 or known.max() >= config.vocab_size or len(known.unique()) < len(known):
            raise UserError(f"draft_ids in {weights} is not a set of the model's tokens", REMEDY)
    return config, tensors


def save_drafter(
    drafter: HeadDrafter, folder: Path, provenance: dict[str, Any], int8: bool = False
) -> None:
    """Writes config.json and the weights in bf16; with `int8`, matrices are rounded to int8."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for name, parameter in drafter.for_files().named_weights().items():
        weight = parameter.detach().cpu()
        if int8 and weight.dim() == 2:
            weights[name], weights[name + SCALE] = to_int8(weight)
        else:
            weights[name] = weight.bfloat16().contiguous()
    if drafter.config.vocabulary == "draft":
        weights["draft_ids"] = drafter.draft_ids.cpu().int()
    save_file(weights, folder / drafter.weights_file)
    owner = provenance.get("backbone", {})
    base = owner.get("id") if isinstance(owner, dict) else owner
    config = {"drafter": drafter.name, "base_model_name_or_path": base, **drafter.config_json()}
    write_json(folder / "config.json", {**config, "provenance": provenance})
