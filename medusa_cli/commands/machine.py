"""`medusa machine`: shows the processor, the engine that runs a model here, and the times of its passes."""

from dataclasses import asdict
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.io import Document
from medusa_cli.files.model_files import check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import LoadFlags, OutputFlags, flag, refuse

DIGITS = 9  # maximum number of digits of a value of --context
# Options that change the bits of logits.
ROUNDING = {"--dtype", "--quantize", "--activations", "--kv"}


def machine(
    *,
    model: options.Model = None,
    context: Annotated[
        str | None,
        flag(
            "--context N,N",
            "Numbers of tokens in the KV cache during the timed passes. [default: 256, or as many as the model allows]",
        ),
    ] = None,
    digest: Annotated[
        bool,
        flag(
            "--digest",
            "Only compare the bits of the logits: print one digest for each instruction set, and the published digest.",
        ),
    ] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Show this machine's processor, the engine that runs a model on it, and the time of a pass by number of rows."""
    printing.configure()
    if digest:
        refuse({"--context": context}, "has no effect with --digest")
    words = context.split(",") if context is not None else []
    if not all(
        word.isascii() and word.isdigit() and len(word) <= DIGITS and int(word) for word in words
    ):
        fault = f"--context {context!r} is not valid"
        raise UsageError(fault, "give numbers of tokens, such as 256,2048")
    source = ModelSource.of(model or DEFAULT_MODEL)
    check_model_files(source)
    if digest:
        _compare_digests(source, loading, printing)
        return
    import torch

    from medusa_cli import native
    from medusa_cli.bench.steps import time_passes
    from medusa_cli.device import processor
    from medusa_cli.engine import load_backbone
    from medusa_cli.engine.memory import memory_of
    from medusa_cli.model.load import resolve_device

    device = torch.device(resolve_device(loading.device))
    memory = memory_of(source, loading, device) if device.type == "cuda" else None
    backbone = load_backbone(source, loading)
    facts = {
        "processor": processor(),
        "instructions": native.instructions() if native.is_available() else [],
        "native": native.why_unavailable() or "available",
        "threads": native.cpu_count(),
        "torch": torch.__version__,
        "model": loading.of(source.name),
        "engine": backbone.engine.title,
        "row_invariant": backbone.engine.row_invariant,
        "memory": None if memory is None else asdict(memory),
        **time_passes(backbone, sorted(set(map(int, words)))),
    }
    if printing.json:
        console.emit_json(facts)
    else:
        _show(facts, None if memory is None else memory.text)


def _show(facts: Document, memory: str | None) -> None:
    """Prints the machine, the engine, the memory that the model needs on a GPU, and the times of passes."""
    instructions = ", ".join(facts["instructions"]) or facts["native"]
    console.result(
        f"{facts['processor']}, {facts['threads']} threads ({instructions}), torch {facts['torch']}"
    )
    console.result(f"{facts['model']}: {facts['engine']}")
    if memory is not None:
        console.result(f"it needs {memory}")
    read = facts["weight_bytes"] / 1e6
    console.result(
        f"a pass reads {read:,.0f} MB of weights; a copy moves {facts['copy_bytes_per_s'] / 1e9:.0f} GB/s here"
    )
    counts = list(next(iter(facts["contexts"].values()))["step_ms"])
    rows = []
    for size, figures in facts["contexts"].items():
        times = (f"{figures['step_ms'][count]:.1f}" for count in counts)
        rows.append([size, *times, f"{figures['prefill_s']:.2f}"])
    head = ["context", *counts, "prompt, s"]
    console.result(console.grid("Milliseconds a pass by rows of random tokens", head, rows))
    promise = "equals" if facts["row_invariant"] else "may differ at near-ties from"
    console.result(f"with drafts, greedy output {promise} that of plain decoding")
    if facts["busy"]:
        console.result("the machine was busy: times are too long")


def _compare_digests(source: ModelSource, loading: LoadFlags, printing: OutputFlags) -> None:
    """Prints the published digest of a model's logits, and that of each instruction set; exits with 1 if any differ."""
    from medusa_cli.bench.digest import PUBLISHED, digests
    from medusa_cli.engine import load_backbone

    by_set = digests(load_backbone(source, loading))
    published = None if ROUNDING & {*loading.given} else PUBLISHED.get(source.name)
    expected = published or next(iter(by_set.values()))
    different = [name for name, value in by_set.items() if value != expected]
    if printing.json:
        facts = {"digests": by_set, "published": published, "equal": not different}
        console.emit_json({"model": source.name, **facts})
    else:
        lines = [*by_set.items(), *([("published", published)] if published else [])]
        console.result("\n".join(f"{name:<12}{value}" for name, value in lines))
        against = "the published digest" if published else f"the digest of {next(iter(by_set))}"
        console.result(
            f"differs from {against}: {', '.join(different)}" if different else "all are equal"
        )
    if different:
        raise typer.Exit(1)
