"""`medusa export`: writes a drafter, or a model with its drafter, in the layout of another program."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from medusa_cli import console, options
from medusa_cli.errors import UsageError
from medusa_cli.files.hub import check_push, push_folder
from medusa_cli.options import LoadFlags, OutputFlags, flag, refuse
from medusa_cli.runs.run import DEFAULT_RUN, Run

if TYPE_CHECKING:
    from medusa_cli.export.folder import Source

FORMATS = ("hf", "drafter", "eagle3", "speculators", "medusa", "data")
TO = (
    "hf: model and drafter for transformers' generate, without this program; drafter: the drafter with its tree, for "
    "--drafter of this program; eagle3: an EAGLE drafter for vLLM, SGLang and llama.cpp; speculators: an EAGLE drafter "
    "in the speculators library's format; "
    "medusa: Medusa heads for vLLM up to 0.32 and TGI; data: the run's conversations, for SpecForge and speculators "
    "to train on."
)
OUTPUT = "The folder to write, which must be new or empty. With --push alone, the files are only uploaded."
PUSH = "Upload the folder, with its card, to this repository of the Hugging Face hub."
BUDGET = "With --to hf: export the tree of N nodes that is best by the calibration. [default: the run's tree]"


def export(
    *,
    output: Annotated[Path | None, flag("--output FOLDER", OUTPUT)] = None,
    push: Annotated[str | None, flag("--push ORG/NAME", PUSH)] = None,
    private: Annotated[
        bool, flag("--private", "With --push: make a new repository private.")
    ] = False,
    to: Annotated[str, flag("--to FORMAT", TO, show_default=True)] = "hf",
    run: options.RunOrShipped = None,
    model: options.Model = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Replace an earlier export in the folder.")
    ] = False,
    budget: Annotated[int | None, flag("--budget N", BUDGET, min=1)] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    printing: OutputFlags,
) -> None:
    """Write a drafter for another program, and print how that program is started with it.

    Without --run, it writes the drafter that ships for the model. --to hf merges an adapter from joint
    training into the model, which keeps the number type in which it is stored. Every folder gets the
    checksums of its files. A drafter's folder also gets a model card.
    """
    printing.configure()
    if to not in FORMATS:
        raise UsageError(f"--to {to!r} is unknown", f"use one of {', '.join(FORMATS)}")
    if to != "hf":
        refuse({"--budget": budget}, f"has no effect with --to {to}", "leave it out")
    if to == "data":
        others = {"--model": model, "--trust-remote-code": trust_remote_code}
        refuse(others, "has no effect with --to data", "leave it out")
        refuse({"--push": push}, "takes drafters, not --to data", "use `hf upload` for data")
    if push is None:
        refuse({"--private": private}, "has no effect without --push", "leave it out")
        if output is None:
            raise UsageError("--output is missing", "give a folder, or --push ORG/NAME")
    else:
        check_push(push)
    with ExitStack() as stack:
        if output is None:
            output = Path(stack.enter_context(TemporaryDirectory())) / "export"
        if to == "data":
            from medusa_cli.export.data_format import export_data

            target = Run.open(run or DEFAULT_RUN)
            launch, notes = export_data(target, output, overwrite=overwrite)
        else:
            from medusa_cli.export.folder import check_output, find_source

            check_output(output, overwrite)
            source = replace(find_source(run, model, trust_remote_code), repository=push)
            trusted = LoadFlags(trust_remote_code=trust_remote_code).of(source.model)
            console.info(
                f"Exporting the {source.kind} drafter {source.run.drafter_dir} for {trusted} to {output}"
            )
            launch, notes = _write(to, output, source, overwrite, budget)
        address = push_folder(output, push, private) if push is not None else None
    for note in notes:
        console.warn(note)
    place = str(output) if address is None else address
    if printing.json:
        console.emit_json({"output": place, "format": to, "launch": launch, "notes": notes})
        return
    console.result(f"{place} is written. To use it:")
    for line in launch:
        console.result(f"  {line}")


def _write(
    to: str, output: Path, source: "Source", overwrite: bool, budget: int | None
) -> tuple[list[str], list[str]]:
    """Writes a drafter's folder; returns the commands that use it, and notes."""
    from medusa_cli.export.drafter_format import export_drafter
    from medusa_cli.export.eagle3_format import export_eagle3
    from medusa_cli.export.hf import export_hf
    from medusa_cli.export.medusa_format import export_medusa
    from medusa_cli.export.speculators_format import export_speculators

    writers: dict[str, Callable[..., tuple[list[str], list[str]]]] = {
        "hf": partial(export_hf, budget=budget),
        "drafter": export_drafter,
        "eagle3": export_eagle3,
        "speculators": export_speculators,
        "medusa": export_medusa,
    }
    return writers[to](source, output, overwrite=overwrite)
