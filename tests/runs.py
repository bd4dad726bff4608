"""Tiny runs on disk for the commands: a saved model, a drafter, a tree, and questions."""

import json
from pathlib import Path

import torch

from medusa_cli.drafters import MedusaHeads
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.runs.files import write_json
from medusa_cli.runs.run import Run, provenance
from medusa_cli.tree import Tree
from medusa_cli.tree.saved import save_tree
from tests.tiny import tiny_backbone

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])


def save_model(folder: Path, **shape) -> str:
    """A tiny Llama with its tokenizer on disk; the path to give as --model."""
    backbone = tiny_backbone(**shape)
    backbone.model.set_attn_implementation("eager")
    backbone.model.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    return str(folder)


def save_run(
    folder: Path,
    model: str,
    *,
    heads: int = 3,
    tree: Tree | None = TREE,
    kind: type[HeadDrafter] = MedusaHeads,
    calibrated: bool = False,
) -> Run:
    """A run with random heads for the tiny model, a tree, and accuracies on request."""
    from medusa_cli.engines import load_backbone

    run = Run.open(str(folder) + "/", create=True)
    run = Run(folder)
    backbone = load_backbone(model, dtype="fp32")
    torch.manual_seed(0)
    drafter = kind.create(backbone, heads, 1, "own")
    for weight in drafter.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    drafter.save(run.drafter_dir, provenance(backbone.identity))
    run.bind(backbone.identity)
    if tree is not None:
        save_tree(run.tree_path, tree, {})
    if calibrated:
        write_json(run.calibration_path, {"accuracies": [[0.5, 0.2, 0.1]] * heads})
    return run


def save_questions(path: Path, count: int = 4) -> str:
    """Questions of two turns in two categories, and one line that is none."""
    lines = [
        json.dumps({"question_id": i, "category": "ab"[i % 2], "turns": [f"w{i} w{i + 1}", f"w{i + 9}"]})
        for i in range(count)
    ]
    path.write_text("\n".join([*lines, '{"question_id": 99}']) + "\n")
    return str(path)
