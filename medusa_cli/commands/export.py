"""`medusa export`: a drafter, or the model with it, in the layout of another program."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.options import LoadFlags, OutputFlags, flag

FORMATS = ("hf", "eagle3", "speculators", "medusa", "data")
TO = (
    "hf: model and drafter for transformers' generate, nothing else installed; eagle3: an EAGLE drafter for vLLM, "
    "SGLang and llama.cpp; speculators: the same as a checkpoint of that library; medusa: Medusa heads for vLLM up to "
    "0.32 and TGI; data: the run's conversations, for SpecForge and speculators to train on."
)
BUDGET = "With --to hf: nodes of the best tree by the calibration. [default: the run's tree]"


def export(
    *,
    output: Annotated[
        Path, flag("--output FOLDER", "The folder to write; it must be new or empty.")
    ],
    to: Annotated[str, flag("--to FORMAT", TO, show_default=True)] = "hf",
    run: options.RunOrShipped = None,
    model: options.Model = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Replace an earlier export in that folder.")
    ] = False,
    budget: Annotated[int | None, flag("--budget N", BUDGET, min=1)] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    printing: OutputFlags,
) -> None:
    """Write a drafter so that another program decodes with it, and print how that program is started.

    Without --run it is the drafter that ships for the model. An adapter from joint training is merged into the model
    that --to hf writes, in the number type it is stored in. Every folder has the checksums of its files.
    """
    printing.configure()
    if to not in FORMATS:
        raise UsageError(f"--to {to!r} is unknown", f"use one of {', '.join(FORMATS)}")
    if budget is not None and to != "hf":
        raise UsageError(f"--budget has no effect with --to {to}", "leave it out")
    if to == "data":
        from medusa_cli.export.data_format import export_data
        from medusa_cli.runs.run import DEFAULT_RUN, Run

        _report(
            output,
            to,
            *export_data(Run.open(run or DEFAULT_RUN), output, overwrite=overwrite),
            printing.json,
        )
        return
    from medusa_cli.export.eagle3_format import export_eagle3
    from medusa_cli.export.folder import find_source
    from medusa_cli.export.hf import export_hf
    from medusa_cli.export.medusa_format import export_medusa
    from medusa_cli.export.speculators_format import export_speculators

    source = find_source(run, model, trust_remote_code)
    trusted = LoadFlags(trust_remote_code=trust_remote_code).of(source.model)
    console.info(
        f"Exporting the {source.kind} drafter {source.run.drafter_dir} for {trusted} to {output}"
    )
    writers: dict[str, Callable[..., tuple[list[str], list[str]]]] = {
        "hf": partial(export_hf, budget=budget),
        "eagle3": export_eagle3,
        "speculators": export_speculators,
        "medusa": export_medusa,
    }
    _report(output, to, *writers[to](source, output, overwrite=overwrite), printing.json)


def _report(output: Path, to: str, launch: list[str], notes: list[str], json: bool) -> None:
    """Prints what was written, and how it is used."""
    for note in notes:
        console.warn(note)
    if json:
        console.emit_json({"output": str(output), "format": to, "launch": launch, "notes": notes})
        return
    console.result(f"{output} is written. To use it:")
    for line in launch:
        console.result(f"  {line}")
