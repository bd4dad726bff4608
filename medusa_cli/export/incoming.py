"""Import of drafters that other tools trained: write a run."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from medusa_cli.drafters.incoming import Checkpoint
from medusa_cli.errors import UserError
from medusa_cli.files.io import replacing_folder, write_json
from medusa_cli.model.load import read_config
from medusa_cli.runs.run import Run, provenance, sole_writer


def import_drafter(
    place: str, run: str | None = None, model: str | None = None, trust_remote_code: bool = False
) -> tuple[Run, dict[str, Any], list[str]]:
    """Reads a folder, file or hub id in any known layout and writes runs/NAME, by default named after it.

    Returns the run, its drafter's kind and heads with the layout they came in, and notes on
    changes. trust_remote_code: run the Python files that the model's config may need. Raises
    UserError, naming the fault, for a checkpoint that does not fit the model, and for a run that
    has a drafter.
    """
    checkpoint = Checkpoint.open(place)
    owner = model or checkpoint.model
    if not isinstance(owner, str):
        raise UserError(
            f"{place} does not name the model of its drafter", "give @model NAME, FOLDER or ID"
        )
    base = read_config(owner, trust_remote_code)
    drafter = checkpoint.read(base, base.vocab_size)

    identity = {"id": owner, "architecture": base.model_type, "layers": base.num_hidden_layers}
    identity |= {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    target = Run.open(run or _run_name(place), create=True)
    with sole_writer(target.path, "medusa import"):
        if (target.drafter_dir / "config.json").is_file():
            raise UserError(f"{target.path} has a drafter already", "give another @run")
        target.bind(identity)
        source = provenance(identity, imported={"from": str(place), "format": drafter.format})
        with replacing_folder(target.drafter_dir) as part:
            path = part / drafter.kind.weights_file
            # Tensors that share memory, as tied ones do, each get their own.
            form = torch.contiguous_format
            copies = {
                name: tensor.detach().clone(memory_format=form)
                for name, tensor in drafter.tensors.items()
            }
            save_file(copies, path)
            path.chmod(0o644)
            write_json(
                part / "config.json",
                {"base_model_name_or_path": owner, **drafter.settings, "provenance": source},
            )
    facts = {
        "drafter": drafter.kind.name,
        "format": drafter.format,
        "heads": drafter.config.num_heads,
    }
    return target, facts, drafter.notes


def _run_name(place: str) -> str:
    """Returns the run's name after a folder (its last part; links keep their own name), a file or a hub id."""
    path = Path(os.path.abspath(Path(place).expanduser()))
    return path.stem if path.is_file() else path.name
