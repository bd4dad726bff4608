"""What a training leaves in its run: the drafter with its provenance, and the adapter or the tuned model."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.identity import identity_of, weights_of
from medusa_cli.runs.io import read_jsonl, replacing, replacing_folder, write_json
from medusa_cli.runs.run import Run, provenance
from medusa_cli.train.checkpoint import save_drafter
from medusa_cli.train.loop import Trainer

log = logging.getLogger(__name__)


def leave(
    trainer: Trainer, target: Run, source: Path, coverage: float, validation: dict[str, Any] | None, run: str
) -> tuple[Run, str]:
    """Save the drafter (and the adapter or tuned model) with its provenance; the run they are in and its name."""
    identity = dict(trainer.backbone.identity)
    tuned = trainer.recipe.train.stage == 2 and trainer.recipe.train.tuning == "full"
    if tuned:
        target, identity = _tuned_run(trainer.backbone, target)
        run = str(target.path)
    elif trainer.recipe.train.stage == 2:
        adapter.save(trainer.backbone.model, target.adapter_dir, identity["id"])
        identity["adapter"] = adapter.digest(target.adapter_dir)
    elif target.adapter is not None:  # it belonged to the drafter that is replaced now
        shutil.rmtree(target.adapter_dir)
    made = provenance(
        identity,
        data={
            "path": str(source),
            "digest": trainer.digest,
            "conversations": trainer.conversations,
        },
        recipe=trainer.recipe.to_dict(),
        steps=trainer.steps,
        positions=trainer.positions,
        draft_coverage=coverage,
        validation=validation,
    )
    save_drafter(trainer.drafter, target.drafter_dir, made)
    if tuned:  # when what was trained is safe
        _copy_conversations(source, target)
    return target, run


def _tuned_run(backbone: Backbone, target: Run) -> tuple[Run, dict[str, Any]]:
    """A fully tuned model is another model: it goes into a run of its own, RUN/tuned."""
    tuned = Run.open(str(target.path / "tuned") + "/", create=True)
    folder = tuned.path / "model"
    backbone.model.set_attn_implementation("sdpa")
    with replacing_folder(folder) as part:
        backbone.model.save_pretrained(part)
        backbone.tokenizer.save_pretrained(part)
    identity = identity_of(backbone.model, id=str(folder), weights=weights_of(str(folder)), adapter=None)
    write_json(tuned.path / "run.json", provenance(identity))
    log.info(f"the tuned model is in {folder}, its run is {tuned.path}")
    return tuned, identity


def _copy_conversations(source: Path, target: Run) -> None:
    """Give a run the conversations of a file, without their states: these were another model's."""
    with replacing(target.distill_path) as part, part.open("w", encoding="utf-8") as out:
        for record in read_jsonl(source, array=True):
            if isinstance(record, dict):  # what is none was not trained on either
                kept = {key: value for key, value in record.items() if key not in ("state_rows", "seal")}
                out.write(json.dumps(kept) + "\n")
