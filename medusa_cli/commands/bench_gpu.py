"""`medusa bench-gpu`: steps by rows at the sizes of real models, which `make bench-gpu` runs."""

from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Said


def bench_gpu(
    *,
    shapes: Annotated[
        str, typer.Option(metavar="LIST", help="Shapes of random weights, with commas between.")
    ] = "random:1b,random:llama-2-7b",
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON and the Markdown go.")] = Path(
        "build/bench-gpu"
    ),
    device: options.Device = "auto",
    said: Said,
) -> None:
    """Time whole steps of large shapes with random weights: eager, lean and captured, with drafting and prefill."""
    said.configure()
    from medusa_cli.backbone.network import resolve_device
    from medusa_cli.benchmarks.shapes import markdown, time_shape
    from medusa_cli.runs.files import write_atomic, write_json
    from medusa_cli.runs.run import provenance

    place = resolve_device(device)
    found = []
    for model in shapes.split(","):
        found.append(time_shape(model.strip(), place, say=console.info))
        # After each: what was measured must not hang on what comes.
        write_json(output / "steps.json", {**provenance(model), "shapes": found})
        write_atomic(output / "steps.md", markdown(found))
    if said.json:
        console.emit_json(found)
        return
    console.result(markdown(found))
    console.result(f"saved: {output / 'steps.json'} and {output / 'steps.md'}")
