"""`medusa doctor`: finds faults of a run that lower acceptance, and names for each a command that helps."""

from collections import Counter
from dataclasses import asdict
from typing import Annotated

from rich.table import Table
from rich.text import Text

from medusa_cli import console, options
from medusa_cli.console import visible
from medusa_cli.errors import UserError
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.runs.load_options import as_trained
from medusa_cli.runs.resolve import shipped_for
from medusa_cli.runs.run import Run

COLORS = {"pass": "green", "unknown": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(
    *,
    run: options.RunOrShipped = None,
    model: options.Model = None,
    quick: Annotated[
        bool,
        flag(
            "--quick",
            "Decode no prompts. The model is still loaded, and run on some conversations.",
        ),
    ] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Examine why a run's acceptance is low, and name the commands that help.

    Looks at the model, the data, the training, the calibration and the tree, decodes some held-out prompts, and changes
    nothing in the run. Without options, it examines the drafter that ships for the default model.
    """
    printing.configure()
    source = ModelSource.of(model or DEFAULT_MODEL)
    target = Run.open(run) if run is not None else shipped_for(source)
    if target is None:
        raise UserError(f"no drafter ships for the model {model!r}", "give the @run that holds one")
    if model is None and target.model is not None:
        source = ModelSource.of(target.model)
    whose = target.path if run is not None else f"the drafter that ships for {source.name}"
    console.info(f"Examining {whose} on {loading.of(source.name)}; --quick leaves decoding out")

    from medusa_cli.doctor import CHECKS, STATUSES, Case, examine

    loading = as_trained(loading, target.drafter_dir)
    case = Case(target, run, source, loading)
    findings = []
    checks = [check for check in CHECKS if not (quick and check == "acceptance")]
    with console.bars() as show:
        for number, check in enumerate(checks):
            show("examining", number, len(checks), "checks", check)
            findings.append(examine(case, check))
        show("examining", len(checks), len(checks), "checks")
    if printing.json:
        status = max((finding.status for finding in findings), key=STATUSES.index)
        facts = {"run": str(target.path), "model": source.name, "status": status}
        console.emit_json({**facts, "findings": [asdict(finding) for finding in findings]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("finding, and the command that helps", overflow="fold")
    for finding in findings:
        text = Text(visible(finding.text))
        if finding.remedy:
            text.append(f"\n-> {visible(finding.remedy)}", style="cyan")
        table.add_row(finding.name, Text(finding.status, style=COLORS[finding.status]), text)
    console.result(table)
    counts = Counter(finding.status for finding in findings)
    faults = ", ".join(
        f"{counts[status]} {status}" for status in ("fail", "warn", "unknown") if counts[status]
    )
    console.result(f"{len(findings)} checks: {faults or 'all passed'}")
