"""`medusa machine`: times of steps on this machine, and the kernel that auto takes."""

from typing import Annotated, Any

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.options import LoadFlags, OutputFlags, flag


def machine(
    *,
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    measure: Annotated[bool, flag("--measure", "Time everything again though it is known.")] = False,
    printing: OutputFlags,
) -> None:
    """Show the time of a decoding step by kernel and rows on this machine, and what auto takes.

    Timed once for each shape of model and kept in the cache folder; the first use of a model times what it needs.
    """
    printing.configure()
    import torch

    from medusa_cli.engine.autotune import (
        EXPECTED,
        KernelTimings,
        copy_bandwidth,
        kernel_timings,
        processor,
        timings_file,
    )
    from medusa_cli.engine.kernels import KERNELS
    from medusa_cli.engine.load import choose_kernel
    from medusa_cli.model.load import has_own_code, read_config

    name = model or DEFAULT_MODEL
    own = trust_remote_code and has_own_code(name)
    config = read_config(name, trust_remote_code)
    kept = KernelTimings() if own else kernel_timings(tuple(KERNELS), config, again=measure)
    if kept.busy is not None:
        console.warn("other programs took much of the processor while this was timed; --measure times it again")
    timings = {kernel: curve for kernel, curve in kept.seconds.items() if curve}  # others cannot be had
    invariant = [kernel for kernel in timings if kernel not in kept.variant]
    eager = not timings  # its layers run as they are: no kernel takes their place
    drafts: dict[str, dict[str, float]] = {}
    for kernel, curve in timings.items():
        seconds = {rows: curve[rows] / tokens for rows, tokens in EXPECTED.items() if rows in curve}
        nodes = min(seconds, key=lambda rows: seconds[rows])
        drafts[kernel] = {"nodes": nodes, "speedup": curve[1] / seconds[nodes]}
    facts: dict[str, Any] = {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": name,
        "copy_bytes_per_s": copy_bandwidth(torch.device("cpu")),
        "auto": "eager" if eager else choose_kernel(name, "cpu", "auto", "auto", None).name,
        "row_invariant": invariant,
        "kept_in": str(timings_file()),
        "step_ms": {kernel: {str(rows): 1e3 * s for rows, s in curve.items()} for kernel, curve in timings.items()},
        "drafts": drafts,
    }
    if printing.json:
        console.emit_json(facts)
        return
    console.result(
        "{processor}, {instructions}, {threads} threads, torch {torch}".format(**facts)
        + f": a copy moves {facts['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )
    if eager:
        console.result(f"auto takes eager: {LoadFlags(trust_remote_code=own).of(name)} runs as it is")
        return
    rows = sorted({count for curve in timings.values() for count in curve})
    title = f"Milliseconds a step of {name} by rows (least of several)"
    lines = [
        [
            kernel,
            *(f"{1e3 * curve[count]:.1f}" if count in curve else "-" for count in rows),
            "{nodes} nodes, {speedup:.2f} x".format(**drafts[kernel]),
        ]
        for kernel, curve in timings.items()
    ]
    console.result(console.grid(title, ["kernel", *map(str, rows), "drafts"], lines, left=("kernel",)))
    console.result("drafts: the best tree with a fair drafter's acceptance, over plain decoding; drafting comes on top")
    console.result(
        f"greedy output over drafts is plain decoding's, bit for bit, with: {', '.join(invariant) or 'no kernel'}"
    )
    reason = "the file's own bits" if facts["auto"] == "gguf" else "the fewest seconds a token over its best tree"
    console.result(f"auto takes {facts['auto']}: {reason}; --measure times again")
