"""A model that anyone loads with transformers alone, whose `generate` then decodes with our drafter and tree."""

import shutil
from pathlib import Path

import torch

from medusa_cli.backbone import adapter
from medusa_cli.backbone.network import DTYPES, checkpoint_dtype, load_network, stored_dtype
from medusa_cli.errors import UserError
from medusa_cli.exporting.card import model_card
from medusa_cli.exporting.folder import Exported, exporting
from medusa_cli.exporting.source import Source
from medusa_cli.exporting.suited import suited
from medusa_cli.tree.saved import load_tree, save_tree
from medusa_cli.tree.tree import Tree

CODE = Path(__file__).parent / "custom_generate"
# Kinds that draft from what an unmodified model's pass gives; FIRP's rows ride inside its layers.
KINDS = ("medusa", "hydra", "amphista", "eagle")


def export_hf(source: Source, output: Path, *, overwrite: bool = False, budget: int | str | None = None) -> Exported:
    """Write the model (an adapter merged), the drafter, tree and calibration, the code that decodes with them, a card.

    budget: the tree's nodes, "auto" for as many as pay in transformers' passes here (which are timed, in the number
    type that is stored), None for the run's own tree. UserError for a kind that has no place in `generate`, or where
    there is no tree, or no calibration to search one by.
    """
    if source.kind not in KINDS:
        raise UserError(
            f"{source.run.drafter_dir} is a {source.kind} drafter, which cannot decode in transformers' generate",
            f"use one of {', '.join(KINDS)}",
        )
    tree, accuracies = _tree(source), (source.calibration or {}).get("accuracies")
    if budget == "auto" and not accuracies:
        budget = None
    if budget is not None and not accuracies:
        raise UserError(f"{source.run.path} has no calibration to search a tree by", "run `medusa calibrate` first")
    own = checkpoint_dtype(source.model, source.trusted)
    network, tokenizer = load_network(
        source.model,
        device="cpu",
        dtype=next(name for name, kind in DTYPES.items() if kind == own),
        chat_template=source.run.chat_template,
        trust_remote_code=source.trusted,
    )
    if source.adapter is not None:
        network = adapter.merge(network, source.adapter)
    notes: tuple[str, ...] = (
        () if source.adapter is None else (f"the adapter {source.adapter} is merged into the model",)
    )
    stored = stored_dtype(source.model, source.trusted)
    if stored not in (own, None):
        notes += (f"the model's weights are stored as {_name(stored)}, and written as {_name(own)}",)
    with exporting(output, overwrite) as part:
        network.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.copytree(source.run.drafter_dir, part / "drafter")
        shutil.copyfile(source.run.tree_path, part / "drafter" / "tree.json")
        if budget is not None:
            tree, gain = suited(part, network, accuracies or [], None if budget == "auto" else int(budget))
            save_tree(part / "drafter" / "tree.json", tree, {})
            if budget == "auto" and gain < 1:
                notes += (f"drafts are expected to give {gain:.2f} x plain `generate` on this machine",)
        if source.calibration is not None:
            shutil.copyfile(source.run.calibration_path, part / "drafter" / "calibration.json")
        (part / CODE.name).mkdir()
        for code in sorted(CODE.glob("*.py")):
            shutil.copyfile(code, part / CODE.name / code.name)
        (part / CODE.name / "requirements.txt").write_text("transformers>=5.20\nsafetensors\n", encoding="utf-8")
        (part / "README.md").write_text(model_card(source, tree, bool(tokenizer.chat_template)), encoding="utf-8")
    call = f"model.generate(**inputs, custom_generate={str(output)!r}, trust_remote_code=True)"
    return Exported(output, (f"AutoModelForCausalLM.from_pretrained({str(output)!r})", call), notes)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _tree(source: Source) -> Tree:
    """The run's tree; UserError where there is none, or it asks for more heads than the drafter has."""
    path = source.run.tree_path
    if not path.is_file():
        raise UserError(f"{source.run.path} has no tree", "run `medusa calibrate` and `medusa tree` first")
    tree = load_tree(path)
    heads = source.config.get("num_heads") or source.config.get("medusa_num_heads")
    if not isinstance(heads, int) or tree.max_depth > heads:
        raise UserError(
            f"the tree {path} is {tree.max_depth} deep, the drafter has {heads} heads", "run `medusa tree` again"
        )
    return tree
