"""`medusa bench --steps`: what a forward pass over so many rows costs on each engine, under the memory's ceiling."""

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table

from medusa_cli import console
from medusa_cli.commands.groups import Where
from medusa_cli.errors import UsageError
from medusa_cli.runs.reading import Document

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.benchmarks.rows import Timed


def bench_steps(model: str, place: Where, contexts: str, as_json: bool) -> None:
    """Measure and print, context by context; engine "auto" measures every engine that can run the model, in turn."""
    from medusa_cli.backbone.memory import peak_memory, reset_peak
    from medusa_cli.benchmarks.rows import ROUNDS, ROWS, copy_bandwidth, time_rows
    from medusa_cli.engines import load_backbone

    sizes, facts = parse_contexts(contexts), Document()
    found: dict[int, dict[str, Timed]] = {size: {} for size in sizes}
    peaks = {str(size): 0 for size in sizes}
    for engine in ("eager", "fast") if place.engine == "auto" else (place.engine,):
        try:
            backbone = load_backbone(model, **replace(place, engine=engine).loading)
        except UsageError:
            if engine == "eager" or place.engine != "auto":
                raise
            continue
        facts = facts or _ceiling(backbone, copy_bandwidth(backbone.device), sizes[-1], place.of(model))
        with console.progress(engine, total=(ROUNDS + 2) * len(ROWS) * len(sizes), unit="steps") as bar:
            for size in sizes:
                bar.describe(f"{engine}, {size:,} tokens in the cache")
                reset_peak(backbone.device)
                found[size] |= time_rows({engine: backbone}, context=size, on_progress=bar.advance)
                peaks[str(size)] = max(peaks[str(size)], peak_memory(backbone.device))
        del backbone  # no two of them are held at once
        gc.collect()
    if as_json:
        timed = {str(size): {name: _facts(one) for name, one in by.items()} for size, by in found.items()}
        console.emit_json({"model": model, **facts, "peak_bytes": peaks, "contexts": timed})
        return
    for size, by in found.items():
        console.result(_table(size, by, facts["ceiling_ms"]))
    held = ", ".join(f"{peaks[str(size)] / 1e6:,.0f} MB with {size:,} tokens" for size in sizes)
    console.result(f"peak memory with one engine loaded: {held}")


def _ceiling(backbone: "Backbone", bandwidth: float, context: int, name: str) -> Document:
    """What bounds a step here, said and returned; UsageError for a context that leaves no room for one."""
    room = backbone.max_positions - 3
    if context > room:
        raise UsageError(
            f"--context {context} and a step are longer than the model's {backbone.max_positions}",
            f"use {room} or less",
        )
    kind, read = str(backbone.dtype).removeprefix("torch."), backbone.engine.weight_bytes
    console.info(
        f"{name} in {kind} on {backbone.device}: {read / 1e6:,.0f} MB of weights at the {bandwidth / 1e9:.1f} GB/s of "
        f"a copy make {1e3 * read / bandwidth:.1f} ms a step at the least"
    )
    facts = {"dtype": kind, "device": str(backbone.device), "weight_bytes": read}
    return {**facts, "copy_bytes_per_s": bandwidth, "ceiling_ms": 1e3 * read / bandwidth}


def parse_contexts(text: str) -> list[int]:
    """The sizes of --context 512,2048, smallest first; UsageError for what is no number of tokens."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--context {text!r}: {word!r} is no number of tokens", "use for example 512,2048")
    return sorted({int(word) for word in words})


def _facts(timed: "Timed") -> Document:
    return {
        "step_ms": {str(rows): 1e3 * seconds for rows, seconds in timed.seconds.items()},
        "prefill_s": timed.prefill_s,
        "cache_bytes": timed.cache_bytes,
    }


def _table(context: int, found: "dict[str, Timed]", ceiling: float) -> Table:
    title = f"Milliseconds a step (over its 1-row step) with {context:,} tokens in the cache"
    table = Table(title=title, caption=f"the weights alone take {ceiling:.1f} ms")
    table.add_column("rows", justify="right")
    for engine in found:
        table.add_column(engine, justify="right")
    for rows in next(iter(found.values())).seconds:
        times = [one.seconds for one in found.values()]
        table.add_row(str(rows), *(f"{1e3 * one[rows]:.1f} ({one[rows] / one[1]:.2f})" for one in times))
    table.add_section()
    table.add_row("prefill, s", *(f"{one.prefill_s:.2f}" for one in found.values()))
    table.add_row("cache, MB", *(f"{one.cache_bytes / 1e6:.1f}" for one in found.values()))
    return table
