"""`medusa bench --steps`: what a forward pass over so many rows costs on each engine, under the memory's ceiling."""

from typing import Any

from medusa_cli import console
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.errors import UsageError


def bench_steps(model: str | None, place: dict[str, Any], context: int, as_json: bool) -> None:
    """Measure and print; engine "auto" measures every engine that can run the model."""
    from medusa_cli.backbone import load_backbone
    from medusa_cli.benchmarks.rows import ROUNDS, ROWS, copy_bandwidth, time_rows

    name = model or DEFAULT_MODEL
    wanted = ("eager", "fast") if place["engine"] == "auto" else (place["engine"],)
    engines = {}
    for engine in wanted:
        try:
            engines[engine] = load_backbone(name, **{**place, "engine": engine})
        except UsageError:
            if place["engine"] != "auto":
                raise
    first = next(iter(engines.values()))
    room = first.max_positions - 3
    if context > room:
        raise UsageError(f"--context {context} is longer than the model's {first.max_positions}", f"use {room} or less")
    kind = str(first.dtype).removeprefix("torch.")
    bandwidth = copy_bandwidth(first.device)
    ceiling = first.weight_bytes / bandwidth
    console.info(
        f"{name} in {kind} on {first.device}: {first.weight_bytes / 1e6:,.0f} MB of weights at the "
        f"{bandwidth / 1e9:.1f} GB/s of a copy make {1e3 * ceiling:.1f} ms a step at the least; "
        f"{context:,} tokens in the cache"
    )
    with console.progress("timing", total=(ROUNDS + 2) * len(ROWS) * len(engines), unit="steps") as bar:
        found = time_rows(engines, context=context, on_progress=bar.advance)
    if as_json:
        console.emit_json(
            {
                "model": name,
                "dtype": kind,
                "device": str(first.device),
                "context": context,
                "weight_bytes": first.weight_bytes,
                "copy_bytes_per_s": bandwidth,
                "ceiling_ms": 1e3 * ceiling,
                "engines": {
                    engine: {str(rows): 1e3 * seconds for rows, seconds in one.items()} for engine, one in found.items()
                },
            }
        )
        return
    console.result(_table(found, ceiling))


def _table(found: dict[str, dict[int, float]], ceiling: float) -> Any:
    from rich.table import Table

    table = Table(title=f"Milliseconds a step (over its 1-row step); the weights alone take {1e3 * ceiling:.1f}")
    table.add_column("rows", justify="right")
    for engine in found:
        table.add_column(engine, justify="right")
    for rows in next(iter(found.values())):
        cells = [f"{1e3 * one[rows]:.1f} ({one[rows] / one[1]:.2f})" for one in found.values()]
        table.add_row(str(rows), *cells)
    return table
