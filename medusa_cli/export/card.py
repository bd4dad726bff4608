"""The model card of an export: base model, license, usage, identity and measured figures."""

from collections.abc import Sequence
from pathlib import Path

from medusa_cli import __version__
from medusa_cli.export.folder import Source
from medusa_cli.files.model_source import ModelSource
from medusa_cli.runs.run import describe_drafter

UNMEASURED = "Not measured yet: `medusa bench --mt-bench` does it."


def front_matter(source: Source) -> str:
    """Returns the lines that the hub reads: base model (if it has a hub id), license (if stated) and tags."""
    import yaml

    facts: dict[str, object] = {}
    if source.model.count("/") == 1 and not Path(source.model).exists():
        facts["base_model"] = source.model
    if license := license_of(source.origin):
        facts["license"] = license
    facts["tags"] = ["speculative-decoding", source.kind]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def license_of(model: ModelSource) -> str | None:
    """Returns the license stated in a model's GGUF file or in its own card, or None if there is none."""
    if model.kind == "gguf":
        stated = model.header.metadata.get("general.license")
        return stated if isinstance(stated, str) else None
    from huggingface_hub import metadata_load, try_to_load_from_cache

    card = Path(model.name) / "README.md"
    if not card.is_file() and model.name.count("/") == 1:
        cached = try_to_load_from_cache(model.name, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    if not card.is_file():
        return None
    stated = (metadata_load(card) or {}).get("license")
    return stated if isinstance(stated, str) else None


def identity_of(source: Source) -> str:
    """Returns a line that identifies the drafter's model by its sizes and the digest of its weights."""
    identity = describe_drafter(source.run.drafter_dir).provenance.identity
    names = {
        "architecture": "architecture",
        "hidden_size": "hidden size",
        "layers": "layers",
        "vocab_size": "vocabulary",
        "weights": "digest of the weights",
    }
    facts = [f"{word} {identity[key]}" for key, word in names.items() if identity.get(key)]
    return f"Made for {source.model} ({', '.join(facts)}) with medusa-cli {__version__}."


def card(source: Source, title: str, use: Sequence[str]) -> str:
    """Returns a card in Markdown; use: paragraphs and shell blocks that explain how to use the folder."""
    parts = [front_matter(source), f"# {title}", *use, identity_of(source)]
    return "\n\n".join([*parts, "## Measured", source.bench or UNMEASURED]) + "\n"


def shell(lines: Sequence[str]) -> list[str]:
    """Returns each command line as a shell block for a card."""
    return [f"```sh\n{line}\n```" for line in lines]
