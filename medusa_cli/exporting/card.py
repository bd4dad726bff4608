"""The README of an exported model: what it is, how to use it, and what was measured."""

from medusa_cli import __version__
from medusa_cli.exporting.source import Source
from medusa_cli.tree.search import expected_length
from medusa_cli.tree.tree import Tree

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


def model_card(source: Source, tree: Tree, chat: bool = True) -> str:
    """The card in Markdown: usage, the table of the newest bench, tree, calibration, and where all of it comes from.

    chat: whether the tokenizer has a chat template."""
    base = [f"base_model: {source.model}"] if source.model.count("/") == 1 else []
    depths = [tree.depths.count(depth) for depth in range(tree.max_depth + 1)]
    heads = source.config.get("num_heads") or source.config.get("medusa_num_heads")
    parts = [
        "\n".join(["---", *base, f"tags: [speculative-decoding, {source.kind}]", "---"]),
        f"# {source.model} with a {source.kind} drafter",
        "The same model, decoding several tokens a pass: a small drafter guesses a tree of tokens, what the text "
        "repeats is guessed again beside it, one pass judges them all, and those stand that the model chooses itself. "
        "Greedy answers are those of the model alone, and so are sampled ones under the same seed, rounding apart. One "
        "prompt at a time, without beams; whatever else `generate` takes (temperature, penalties, stop strings, a "
        "streamer) works as ever.",
        USE.format(prompt=CHAT if chat else PLAIN),
        "`trust_remote_code=True` runs the four files in `custom_generate/`: read them, they are short. Where the "
        "model was loaded from another place, `drafter=FOLDER` says where this folder is. Where drafts do not pay, "
        'steps go without; `drafts="always"` keeps the drafter\'s in, `drafts="lookup"` takes repetitions alone.',
        "## Measured",
        source.bench or "Not measured yet: `medusa bench --mt-bench` does it.",
        "## Drafter and tree",
        f"{heads} heads ({source.kind}); a tree of {tree.size} nodes, {'/'.join(map(str, depths))} by depth"
        + _expected(source, tree),
        _calibration(source),
        "## Files",
        "`drafter/` holds the drafter, its tree and its calibration as medusa-cli writes them "
        f"(version {__version__}); `SHA256SUMS` the checksums of all files (`sha256sum -c SHA256SUMS`).",
        *_origin(source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _expected(source: Source, tree: Tree) -> str:
    calibration = source.calibration
    if calibration is None:
        return "."
    return f", expected to give {expected_length(tree, calibration['accuracies']):.2f} tokens a pass."


def _calibration(source: Source) -> str:
    """How often each head's guesses are right, as a table of the first five ranks."""
    calibration = source.calibration
    if calibration is None:
        return ""
    top = min(5, len(calibration["accuracies"][0]))
    lines = [
        f"How often each guess is right, in %, on {calibration.get('positions', 0):,} tokens never trained on:",
        "",
        "| head | " + " | ".join(f"guess {rank + 1}" for rank in range(top)) + " |",
        "|---" * (top + 1) + "|",
    ]
    for head, row in enumerate(calibration["accuracies"], 1):
        lines.append(f"| {head} | " + " | ".join(f"{100 * value:.1f}" for value in row[:top]) + " |")
    return "\n".join(lines)


def _origin(source: Source) -> list[str]:
    """When and on what the drafter was trained."""
    made = source.config.get("provenance") or {}
    data = made.get("data") or {}
    words = [f"Trained {made['created'][:10]}" if made.get("created") else ""]
    if made.get("positions"):
        words.append(f"on {made['positions']:,} positions")
    if data.get("conversations"):
        words.append(f"of {data['conversations']:,} conversations in the model's own words")
    said = " ".join(word for word in words if word)
    return [said + "."] if said else []
