"""`medusa machine`: what this machine is fast at, and what auto makes of it."""

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.options import LoadFlags, OutputFlags


def machine(
    *,
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    measure: Annotated[bool, typer.Option("--measure", help="Time everything again though it is known.")] = False,
    said: OutputFlags,
) -> None:
    """Show the time of a decoding step by kernel and rows on this machine, its ceilings, and what auto takes.

    Timed once for each shape of model and kept in the cache folder; the first use of a model times what it needs.
    """
    said.configure()
    import torch

    from medusa_cli.bench.steps import copy_bandwidth, operations_rate
    from medusa_cli.engine.autotune import kernel_timings, processor, timings_file
    from medusa_cli.engine.kernels import KERNELS
    from medusa_cli.engine.load import choose_kernel
    from medusa_cli.model.load import has_own_code, read_config

    name = model or DEFAULT_MODEL
    config, device = read_config(name, trust_remote_code), torch.device("cpu")
    own = trust_remote_code and has_own_code(name)  # its layers run as they are: no kernel takes their place
    timings = {} if own else kernel_timings(tuple(KERNELS), config, again=measure)
    taken = "eager" if own else choose_kernel(name, "cpu", "auto", "auto", None).name
    bandwidth, flops = copy_bandwidth(device), operations_rate(device, torch.float32)
    facts = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": name,
        "copy_bytes_per_s": bandwidth,
        "fp32_flops_per_s": flops,
        "auto": taken,
        "kept_in": str(timings_file()),
    }
    if said.json:
        console.emit_json(
            {**facts, "step_ms": {k: {str(n): 1e3 * s for n, s in c.items()} for k, c in timings.items()}}
        )
        return
    console.result(
        f"{facts['processor']}, {facts['instructions']}, {facts['threads']} threads, torch {facts['torch']}: "
        f"a copy moves {bandwidth / 1e9:.0f} GB/s, fp32 products reach {flops / 1e9:.0f} GFLOP/s"
    )
    if own:
        console.result(f"auto takes eager: {LoadFlags(trust_remote_code=True).of(name)}, runs as it is")
        return
    console.result(_table(name, timings, taken))
    console.result(
        f"auto takes {taken}: of the kernels that are true to the checkpoint's numbers it costs least a token, "
        f"over the tree that pays best. Kept in {timings_file()}; --measure times it again"
    )


def _table(model: str, seconds: Mapping[str, Mapping[int, float]], taken: str) -> Table:
    rows = sorted({count for curve in seconds.values() for count in curve})
    table = Table(title=f"Milliseconds a step of {model} by rows (least of several)")
    table.add_column("kernel")
    for count in rows:
        table.add_column(str(count), justify="right")
    for name, curve in seconds.items():
        cells = (f"{1e3 * curve[count]:.1f}" if count in curve else "-" for count in rows)
        table.add_row(name, *cells, style="bold green" if name == taken else None)
    return table
