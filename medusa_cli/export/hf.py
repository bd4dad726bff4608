"""A folder from which transformers alone decodes with drafts: model, drafter, tree, code and a model card."""

import shutil
from pathlib import Path

import torch

from medusa_cli import __version__
from medusa_cli.errors import UsageError, UserError
from medusa_cli.export.folder import Source, exporting
from medusa_cli.model import lora
from medusa_cli.model.load import DTYPES, checkpoint_dtype, load_network, stored_dtype
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.tree.io import MAX_NODES, load_tree, save_tree
from medusa_cli.tree.search import expected_length, largest, search
from medusa_cli.tree.tree import Tree

CODE = Path(__file__).parent / "custom_generate"
# Kinds that draft from what an unmodified model returns; FIRP's extra rows go through its layers.
KINDS = ("medusa", "hydra", "amphista", "eagle")
# Nodes of the tree if the run has a calibration and no tree.
NODES = 16
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its id on a hub
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
{prompt}
answer = model.generate(**inputs, max_new_tokens=200, custom_generate=folder, trust_remote_code=True)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```"""
CHAT = """inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Why is the sky blue?"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)"""
PLAIN = 'inputs = tokenizer("Why is the sky blue?", return_tensors="pt")'


def export_hf(
    source: Source, output: Path, *, overwrite: bool = False, budget: int | None = None
) -> tuple[list[str], list[str]]:
    """Writes the model (an adapter merged), drafter, tree and calibration, the code that decodes with them, a card.

    budget: nodes of the best tree by the calibration; None for the run's own tree. UserError for a kind of drafter that
    transformers cannot run, or without a tree or a calibration to search one by.
    """
    if source.kind not in KINDS:
        raise UserError(
            f"@to hf cannot hold the {source.kind} drafter {source.run.drafter_dir}",
            f"use a drafter of {', '.join(KINDS)}",
        )
    tree = _tree(source, budget)
    dtype, stored = (find(source.model, source.trusted) for find in (checkpoint_dtype, stored_dtype))
    network, tokenizer = load_network(
        source.model,
        LoadOptions(
            device="cpu",
            dtype=next(name for name, known in DTYPES.items() if known == dtype),
            trust_remote_code=source.trusted,
        ),
        chat_template=source.run.chat_template,
    )
    notes = []
    if source.run.adapter is not None:
        network = lora.merge(network, source.run.adapter)
        notes.append(f"the adapter {source.run.adapter} is merged into the model")
    if stored not in (dtype, None):
        notes.append(f"the model's weights are stored as {_name(stored)}, and written as {_name(dtype)}")
    with exporting(output, overwrite) as part:
        network.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.copytree(source.run.drafter_dir, part / "drafter")
        save_tree(part / "drafter" / "tree.json", tree, {})
        if source.calibration is not None:
            shutil.copyfile(source.run.calibration_path, part / "drafter" / "calibration.json")
        shutil.copytree(CODE, part / CODE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (part / CODE.name / "requirements.txt").write_text("transformers>=5.20\nsafetensors\n", encoding="utf-8")
        (part / "README.md").write_text(model_card(source, tree, bool(tokenizer.chat_template)), encoding="utf-8")
    call = f"model.generate(**inputs, custom_generate={str(output)!r}, trust_remote_code=True)"
    return [f"AutoModelForCausalLM.from_pretrained({str(output)!r})", call], notes


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _tree(source: Source, budget: int | None) -> Tree:
    """Returns the run's tree, or the best one of so many nodes by the calibration."""
    path, calibration = source.run.tree_path, source.calibration
    if budget is None and path.is_file():
        tree = load_tree(path)
        if tree.max_depth > source.config.num_heads:
            fault = f"the tree {path} is {tree.max_depth} deep, the drafter has {source.config.num_heads} heads"
            raise UserError(fault, "run `medusa tree` again")
        return tree
    if calibration is None:
        raise UserError(f"{source.run.path} has no calibration to search a tree by", "run `medusa calibrate` first")
    if budget is not None and budget > MAX_NODES:
        raise UsageError(f"@budget {budget} is more than one step can verify", f"use 1 to {MAX_NODES:,}")
    accuracies = calibration["accuracies"][: source.config.num_heads]
    return search(accuracies, min(NODES, largest(accuracies)) if budget is None else budget)


def model_card(source: Source, tree: Tree, chat: bool = True) -> str:
    """Returns the card in Markdown: usage, the newest bench report, and the tree.

    chat: the tokenizer has a chat template.
    """
    base = [f"base_model: {source.model}"] if source.model.count("/") == 1 else []
    depths = "/".join(str(tree.depths.count(depth)) for depth in range(tree.max_depth + 1))
    drafter = f"{source.config.num_heads} heads ({source.kind}); a tree of {tree.size} nodes, {depths} by depth"
    if source.calibration is not None:
        expected = expected_length(tree, source.calibration["accuracies"])
        drafter += f", with an expected acceptance length of {expected:.2f} tokens a pass"
    parts = [
        "\n".join(["---", *base, f"tags: [speculative-decoding, {source.kind}]", "---"]),
        f"# {source.model} with a {source.kind} drafter",
        "The same model decodes several tokens a pass. A small drafter proposes a tree of tokens, matches of earlier "
        "text propose more, one pass verifies them all, and the tokens that the model itself chooses are accepted. "
        "Greedy answers are those of the model alone, and so are sampled ones under the same seed, rounding apart. One "
        "prompt at a time, without beams; whatever else `generate` takes (temperature, penalties, stop strings, a "
        "streamer) works as ever.",
        USE.format(prompt=CHAT if chat else PLAIN),
        "`trust_remote_code=True` runs the files in `custom_generate/`: read them, they are short. If the model was "
        "loaded from another place, `drafter=FOLDER` names this folder. Steps go without drafts while drafts do not "
        'pay; `drafts="always"` drafts in every step.',
        "## Measured",
        source.bench or "Not measured yet: `medusa bench --mt-bench` does it.",
        "## Drafter and tree",
        f"{drafter}.",
        "## Files",
        "`drafter/` holds the drafter, its provenance, tree and calibration as medusa-cli writes them "
        f"(version {__version__}); `SHA256SUMS` holds the checksums of all files (`sha256sum -c SHA256SUMS`).",
    ]
    return "\n\n".join(parts) + "\n"
