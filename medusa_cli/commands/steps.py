"""`medusa bench --steps`: what a forward pass over so many rows costs on each engine, under the memory's ceiling."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from medusa_cli import console
from medusa_cli.commands.groups import Where
from medusa_cli.errors import UsageError

if TYPE_CHECKING:
    from medusa_cli.benchmarks.rows import Timed


def bench_steps(model: str, place: Where, contexts: str, as_json: bool) -> None:
    """Measure and print, context by context; engine "auto" measures every engine that can run the model."""
    from medusa_cli.backbone.memory import peak_memory, reset_peak
    from medusa_cli.benchmarks.rows import ROUNDS, ROWS, copy_bandwidth, time_rows
    from medusa_cli.engines import load_backbone

    sizes = parse_contexts(contexts)
    wanted = ("eager", "fast") if place.engine == "auto" else (place.engine,)
    engines = {}
    for engine in wanted:
        try:
            engines[engine] = load_backbone(model, **{**place.loading, "engine": engine})
        except UsageError:
            if engine == "eager" or place.engine != "auto":
                raise
    first = next(iter(engines.values()))
    room = first.max_positions - 3
    if sizes[-1] > room:
        raise UsageError(
            f"--context {sizes[-1]} and a step are longer than the model's {first.max_positions}",
            f"use {room} or less",
        )
    kind = str(first.dtype).removeprefix("torch.")
    bandwidth = copy_bandwidth(first.device)
    ceiling = first.engine.weight_bytes / bandwidth
    console.info(
        f"{place.of(model)} in {kind} on {first.device}: {first.engine.weight_bytes / 1e6:,.0f} MB of weights "
        f"at the {bandwidth / 1e9:.1f} GB/s of a copy make {1e3 * ceiling:.1f} ms a step at the least"
    )
    found: dict[int, dict[str, Timed]] = {}
    peaks: dict[str, int] = {}
    with console.progress("timing", total=(ROUNDS + 2) * len(ROWS) * len(engines) * len(sizes), unit="steps") as bar:
        for size in sizes:
            bar.describe(f"{size:,} tokens in the cache")
            reset_peak(first.device)
            found[size] = time_rows(engines, context=size, on_progress=bar.advance)
            peaks[str(size)] = peak_memory(first.device)
    if as_json:
        console.emit_json(
            {
                "model": model,
                "dtype": kind,
                "device": str(first.device),
                "weight_bytes": first.engine.weight_bytes,
                "copy_bytes_per_s": bandwidth,
                "ceiling_ms": 1e3 * ceiling,
                "peak_bytes": peaks,
                "contexts": {
                    str(size): {one: _facts(timed) for one, timed in by.items()} for size, by in found.items()
                },
            }
        )
        return
    for size, by in found.items():
        console.result(_table(size, by, ceiling))
    held = ", ".join(f"{peaks[str(size)] / 1e6:,.0f} MB with {size:,} tokens" for size in sizes)
    console.result(f"peak memory with the {' and '.join(engines)} engine loaded: {held}")


def parse_contexts(text: str) -> list[int]:
    """The sizes of --context 512,2048, smallest first; UsageError for what is no number of tokens."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--context {text!r}: {word!r} is no number of tokens", "use for example 512,2048")
    return sorted({int(word) for word in words})


def _facts(timed: "Timed") -> dict[str, Any]:
    return {
        "step_ms": {str(rows): 1e3 * seconds for rows, seconds in timed.seconds.items()},
        "prefill_s": timed.prefill_s,
        "cache_bytes": timed.cache_bytes,
    }


def _table(context: int, found: "dict[str, Timed]", ceiling: float) -> Table:
    title = f"Milliseconds a step (over its 1-row step) with {context:,} tokens in the cache"
    table = Table(title=title, caption=f"the weights alone take {1e3 * ceiling:.1f} ms")
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
