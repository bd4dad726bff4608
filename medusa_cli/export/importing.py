"""Imports other tools' drafters, each into a run."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from medusa_cli.data.conversation import check_conversations
from medusa_cli.data.draft_vocabulary import frequent_tokens
from medusa_cli.data.packing import read_dataset
from medusa_cli.drafters.incoming import Checkpoint, Incoming, check_tensors
from medusa_cli.drafters.kinds import weight_shapes
from medusa_cli.drafters.mtp import Mtp, checkpoint_tensors
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files.io import convert, replacing_folder, write_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.mtp_layer import NAME, mtp_settings
from medusa_cli.files.paths import expanded
from medusa_cli.model.backbone import identity_of
from medusa_cli.model.load import read_config
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions
from medusa_cli.runs.recipe import DrafterRecipe
from medusa_cli.runs.run import Run, called, provenance, sole_writer

log = logging.getLogger(__name__)


def import_drafter(
    place: str, run: str | None = None, model: str | None = None, trust_remote_code: bool = False
) -> tuple[Run, dict[str, Any], list[str]]:
    """Reads a checkpoint (a folder, file or hub id) in any known layout; writes a run, by default of the same name.

    Returns the run, a dict of the drafter's kind, number of heads and original layout, and notes on changes.
    trust_remote_code: runs Python files that the model's config may need. Raises UserError with the
    reason if the checkpoint does not fit the model, or if the run already has a drafter.
    """
    run = run or _run_name(place)
    _check_free(run)
    checkpoint = Checkpoint.open(place)
    owner = model or checkpoint.model
    if not isinstance(owner, str):
        fault = f"{place} does not name the model of its drafter"
        raise UserError(fault, "give @model NAME, FOLDER or ID")
    base = read_config(ModelSource.of(owner), trust_remote_code)
    drafter = checkpoint.read(base, base.vocab_size)

    identity = identity_of(base, base.vocab_size, id=owner)
    target = Run.planned(run)
    imported = {"from": str(place), "format": drafter.format}
    _write(target, drafter, identity, imported)
    facts = {"drafter": drafter.kind.name, "format": drafter.format}
    facts["heads"] = drafter.config.num_heads
    return target, facts, drafter.notes


def import_mtp(
    run: str | None,
    model: ModelSource,
    data: Path | None = None,
    size: int | None = None,
    options: LoadOptions = DEFAULT_LOADING,
) -> tuple[Run, dict[str, Any], list[str]]:
    """Writes the MTP layer of a model's checkpoint into a run; returns the same values as `import_drafter`.

    The draft vocabulary holds the `size` most frequent tokens of the conversations in `data`, by
    default of the run's conversations. Without conversations, the drafter scores all tokens.
    """
    run = run or f"{called(model.name)}-{NAME}"
    _check_free(run)
    if data is not None:
        check_conversations(data)
    settings = mtp_settings(model)
    tensors = checkpoint_tensors(model)
    target = Run.planned(run)
    source = data or (target.data_path if target.data_path.is_file() else None)
    if source is None and size is not None:
        fault = f"@draft_vocab_size {size} needs conversations to count tokens in"
        raise UsageError(fault, "give @data FILE")
    size = min(size or DrafterRecipe().draft_vocab_size, settings["vocab_size"])
    base = read_config(model, options.trust_remote_code)
    identity = identity_of(base, base.vocab_size, id=model.name)
    if source is not None:
        backbone = load_backbone(model, options)
        identity = backbone.identity
        dataset = read_dataset(source, backbone, 0.0)
        log.info(f"{source}: {dataset.report}")
        texts = dataset.texts()
        tensors["draft_ids"] = frequent_tokens(texts, size, settings["vocab_size"]).sort().values
        settings |= {"vocabulary": "draft", "draft_vocab_size": size}
    config = convert(settings, Mtp.config_class, "the MTP layer's config")
    check_tensors(
        {name: tensors[name] for name in tensors if name != "draft_ids"},
        weight_shapes(Mtp, config),
        model.name,
    )
    drafter = Incoming(NAME, Mtp, config, settings, tensors, [])
    _write(target, drafter, identity, {"from": model.name, "format": NAME})
    return target, {"drafter": NAME, "format": NAME, "heads": config.num_heads}, []


def _check_free(run: str) -> None:
    """Raises UserError if a run already has a drafter."""
    target = Run(Run.folder(run))
    if target.has_drafter:
        raise UserError(f"{target.path} has a drafter already", "give another @run")


def _write(
    target: Run, drafter: Incoming, identity: dict[str, Any], imported: dict[str, Any]
) -> None:
    """Writes a drafter into a run; raises UserError if the run already has one or belongs to another model."""
    with sole_writer(target.path, "medusa import"):
        _check_free(str(target.path) + os.sep)
        target.bind(identity)
        source = provenance(identity, imported=imported)
        with replacing_folder(target.drafter_dir) as part:
            # Tensors that share memory, such as tied weights, are copied separately.
            form = torch.contiguous_format
            copies = {
                name: tensor.detach().clone(memory_format=form)
                for name, tensor in drafter.tensors.items()
            }
            save_file(copies, part / drafter.kind.weights_file)
            owner = {"base_model_name_or_path": identity["id"]}
            write_json(part / "config.json", {**owner, **drafter.settings, "provenance": source})


def _run_name(place: str) -> str:
    """Returns the last part of a path or hub id, without a file's ending, as a run's name. Links are not resolved."""
    path = Path(os.path.abspath(expanded(place)))
    return path.stem if path.is_file() else path.name
