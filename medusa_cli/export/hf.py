"""Export of a folder for decoding with drafts in transformers: model, drafter, tree, code and model card."""

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from medusa_cli import __version__
from medusa_cli.drafters import DRAFTERS
from medusa_cli.errors import UsageError, UserError
from medusa_cli.export.card import UNMEASURED, front_matter, identity_of
from medusa_cli.export.custom_generate import KINDS
from medusa_cli.export.folder import Source, exporting
from medusa_cli.files.quiet import without_progress_bars
from medusa_cli.model import lora
from medusa_cli.model.backbone import stateful_modules
from medusa_cli.model.load import checkpoint_dtype, load_network, name_of_dtype, stored_dtype
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.run import rounding_in
from medusa_cli.tree.io import MAX_NODES, load_tree, save_tree
from medusa_cli.tree.search import expected_length, largest, search
from medusa_cli.tree.tree import Tree

PACKAGE = Path(__file__).parents[1]
IMPORT = re.compile(r"^( *)from medusa_cli\.([\w.]+) import(.*\n)", re.MULTILINE)
# Modules that the decoding files import only for types; annotations are never evaluated.
TYPES = {"engine.extra_rows", "model"}
# The file that replaces engine/linear.py, which packs weights with the native library.
LINEAR = '''"""Linear layers of drafters when they draft: as they are."""

from torch.nn import functional as F


def packs(device):
    """Returns False: weights are not packed."""
    return False


def packed_copy(module, pack):
    """Returns the module as it is."""
    return module


def packed_linear(weight, bias=None, pack=None):
    """Returns the linear layer of a weight [N, K]."""
    return lambda x: F.linear(x, weight, bias)


packed_parts = None  # only for packed weights


class NativeLinear:
    """Stands for a class of the native library, of which no object exists here."""


NativeDecoderLayer = NativeLevels = NativeLinear
'''
REQUIREMENTS = "transformers>=5.20\nsafetensors\n"
# Number of tree nodes if the run has a calibration but no tree.
NODES = 16
CHAT = """inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Why is the sky blue?"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)"""
TEXT = 'inputs = tokenizer("Why is the sky blue?", return_tensors="pt")'
CARD = """{head}

# {model} with a {kind} drafter

A small drafter proposes a tree of tokens, and n-gram matches propose more. One pass of the model verifies them all.
Greedy answers are the model's own, and so are sampled ones under the same seed, apart from rounding. It takes
one prompt at a time and no beams; other arguments of `generate` work as usual.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # this folder, or its id on the hub
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
{prompt}
answer = model.generate(**inputs, max_new_tokens=200, custom_generate=folder, trust_remote_code=True)
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```

`trust_remote_code=True` runs the files in `custom_generate/`; `generate.py` is the first to read. `drafter=FOLDER`
names this folder if the model was loaded from another place. Steps go without drafts while drafts do not pay;
`drafts="always"` drafts in every step.

## Measured

{bench}

{identity}

## Files

- `drafter/`: {heads} heads with their provenance and calibration, written by medusa-cli {version}
- `drafter/tree.json`: {tree}
- `SHA256SUMS`: `sha256sum -c SHA256SUMS` checks all files
"""


@without_progress_bars()
def export_hf(
    source: Source, output: Path, *, overwrite: bool = False, budget: int | None = None
) -> tuple[list[str], list[str]]:
    """Writes the model (with any adapter merged), drafter, tree, calibration, decoding code and a model card.

    budget: the number of nodes of the best tree according to the calibration; None: the run's own
    tree. Raises UserError if transformers cannot run the kind of drafter or the model's layers, or
    if there is neither a tree nor a calibration with which to search a tree.
    """
    if source.kind not in KINDS:
        fault = f"@to hf cannot hold the {source.kind} drafter {source.run.drafter_dir}"
        raise UserError(fault, f"use a drafter of {', '.join(KINDS)}")
    tree = _tree(source, budget)
    dtype = checkpoint_dtype(source.origin, source.trusted)
    stored = stored_dtype(source.origin, source.trusted)
    options = LoadOptions(
        device="cpu", dtype=name_of_dtype(dtype), trust_remote_code=source.trusted
    )
    network, tokenizer = load_network(
        source.origin, options, chat_template=source.run.chat_template
    )
    if stateful_modules(network):
        fault = f"@to hf: layers of {source.model!r} keep a running state, with which transformers follows no tree"
        raise UserError(fault, "use `medusa chat` or `medusa serve`")
    notes = []
    if source.run.adapter is not None:
        network = lora.merge(network, source.run.adapter)
        notes.append(f"the adapter {source.run.adapter} is merged into the model")
    if rounded := rounding_in(source.run.drafter_dir):
        notes.append(
            f"the drafter was trained for the model quantized by {rounded}; this model has whole weights, which can "
            "lower the acceptance"
        )
    if stored not in (dtype, None):
        notes.append(
            f"the model's weights are stored as {_name(stored)}, and written as {_name(dtype)}"
        )
    with exporting(output, overwrite) as part:
        network.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.copytree(source.run.drafter_dir, part / "drafter")
        # A file in 8 bits also has scales, which the exported code does not read.
        weights = {
            name: tensor.to(dtype if tensor.is_floating_point() else torch.int32).contiguous()
            for name, tensor in source.tensors.items()
        }
        save_file(weights, part / "drafter" / DRAFTERS[source.kind].weights_file)
        save_tree(part / "drafter" / "tree.json", tree, {})
        if source.run.calibration_path.is_file():
            shutil.copyfile(source.run.calibration_path, part / "drafter" / "calibration.json")
        _write_code(part / "custom_generate")
        (part / "README.md").write_text(
            _card(source, tree, bool(tokenizer.chat_template)), encoding="utf-8"
        )
    name = source.name_of(output)
    call = f"model.generate(**inputs, custom_generate={name!r}, trust_remote_code=True)"
    return [f"AutoModelForCausalLM.from_pretrained({name!r})", call], notes


def _write_code(folder: Path) -> None:
    """Writes the decoding files to one folder with relative imports, because transformers copies no other files."""
    modules = ["export.custom_generate"]
    texts = {"engine_linear.py": LINEAR, "requirements.txt": REQUIREMENTS}

    def relative(match: re.Match[str]) -> str:
        indent, module, names = match.groups()
        if module in TYPES:
            return ""
        name = module.replace(".", "_")
        if module not in modules and f"{name}.py" not in texts:
            modules.append(module)
        return f"{indent}from .{name} import{names}"

    for module in modules:  # the list grows as imports are found
        path = PACKAGE / module.replace(".", "/")
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(
            encoding="utf-8"
        )
        name = "generate" if module == modules[0] else module.replace(".", "_")
        texts[f"{name}.py"] = IMPORT.sub(relative, text)
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _tree(source: Source, budget: int | None) -> Tree:
    """Returns the run's tree, or the best tree of `budget` nodes according to the calibration."""
    path = source.run.tree_path
    calibration = source.calibration
    heads = source.config.num_heads
    if budget is None and path.is_file():
        tree = load_tree(path)
        if tree.max_depth > heads:
            fault = f"the tree {path} is {tree.max_depth} deep, the drafter has {heads} heads"
            raise UserError(fault, f"run `medusa tree --run {source.run.argument}` again")
        return tree
    if calibration is None:
        fault = f"{source.run.path} has no calibration to search a tree by"
        raise UserError(fault, f"run `medusa calibrate --run {source.run.argument}` first")
    if budget is not None and budget > MAX_NODES:
        fault = f"@budget {budget} is more than one step can verify"
        raise UsageError(fault, f"use 1 to {MAX_NODES:,}")
    accuracies = calibration["accuracies"][:heads]
    return search(accuracies, min(NODES, largest(accuracies)) if budget is None else budget)


def _card(source: Source, tree: Tree, chat: bool) -> str:
    """Returns the model card in Markdown; chat: the tokenizer has a chat template."""
    nodes = f"{tree.size} nodes"
    if source.calibration is not None:
        nodes += f", {expected_length(tree, source.calibration['accuracies']):.2f} expected tokens per step"
    return CARD.format(
        head=front_matter(source),
        name=source.repository or ".",
        identity=identity_of(source),
        model=source.model,
        kind=source.kind,
        prompt=CHAT if chat else TEXT,
        bench=source.bench or UNMEASURED,
        heads=source.config.num_heads,
        tree=nodes,
        version=__version__,
    )
