"""`medusa export`: a drafter, or the model with it, in the layout of another program."""

import re
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.commands.groups import Said, Where
from medusa_cli.errors import UsageError, shown

FORMATS = ("hf", "eagle3", "medusa")


def export(
    *,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write; it must be new or empty.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="hf: model and drafter for transformers' generate, nothing else installed; eagle3: a drafter of that "
            "kind for vLLM, SGLang and llama.cpp; medusa: heads for vLLM up to 0.32 and TGI.",
        ),
    ] = "hf",
    run: options.RunOrShipped = None,
    model: options.Model = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="auto|run|N",
            help="With --to hf: the tree's nodes; auto times transformers' passes here and takes what pays best, run "
            "takes the run's tree. [default: auto, run without a calibration]",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in that folder.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    said: Said,
) -> None:
    """Write a drafter so that another program decodes with it, and say how that one is started.

    Without --run it is the drafter that ships for the model. An adapter from joint training is merged into the model
    that --to hf writes, in the number type it is stored in; every folder has the checksums of its files.
    """
    said.configure()
    if to not in FORMATS:
        raise UsageError(f"--to {to!r} is unknown", f"use one of {', '.join(FORMATS)}")
    if budget is not None and to != "hf":
        raise UsageError(f"--budget says nothing to --to {to}", "leave it out")
    if budget not in (None, "auto", "run") and not re.fullmatch("0*[1-9][0-9]{0,4}", budget):
        raise UsageError(f"--budget {shown(budget)} is no number of nodes", "use auto, run, or how many")
    from medusa_cli.exporting import export_as
    from medusa_cli.exporting.source import find_source

    source = find_source(run, model, trust_remote_code)
    whose = Where(trust_remote_code=trust_remote_code).of(source.model)
    console.info(f"Exporting the {source.kind} drafter {source.run.drafter_dir} for {whose} to {output}")
    nodes: int | str | None = None
    if to == "hf" and budget != "run" and (budget or source.calibration):
        nodes = int(budget) if budget not in (None, "auto") else "auto"
    done = export_as(to, source, output, overwrite=overwrite, **({"budget": nodes} if nodes else {}))
    for note in done.notes:
        console.warn(note)
    if said.json:
        console.emit_json(
            {"output": str(done.folder), "format": to, "launch": list(done.launch), "notes": list(done.notes)}
        )
        return
    console.result(f"{done.folder} is written. To use it:")
    for line in done.launch:
        console.result(f"  {line}")
