"""`medusa doctor`: faults of a run that lower acceptance, each with a command that helps."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from medusa_cli import console, options
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.console import visible
from medusa_cli.errors import UserError, in_flags
from medusa_cli.options import LoadFlags, OutputFlags, follow
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.doctor import Finding

TEMPERATURE = 0.7
COLOURS = {"ok": "green", "unknown": "dim", "warn": "yellow", "bad": "bold red"}


def doctor(
    *,
    run: options.RunOrShipped = None,
    model: options.Model = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            callback=options.check_temperature,
            help=f"The temperature at which you sample, held against greedy decoding. [default: {TEMPERATURE}]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Neither decode nor time steps: files and data alone.")
    ] = False,
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Why is my acceptance low? Examine a run, and say what is amiss and which command helps.

    Looks at the model, the data, the training, the calibration, the tree and this machine, decodes some held-out
    prompts, and changes nothing in the run. Typed bare it examines the drafter that ships. About a minute on two cores.
    """
    said.configure()
    target = Run.open(run) if run is not None else Run.pretrained(model or DEFAULT_MODEL)
    if target is None:
        raise UserError(f"no drafter ships for the model {model!r}", "give the @run that holds one")
    name = model or _model_of(target) or DEFAULT_MODEL
    whose = target.path if run is not None else f"the drafter that ships for {name}"
    console.info(f"Examining {whose} on {place.of(name)}; --quick leaves decoding out")

    from medusa_cli.doctor import Case, chosen, examine, worst

    if (target.drafter_dir / "config.json").is_file():
        place = follow(target.drafter_dir, place)
    case = Case(target, run, name, place, TEMPERATURE if temperature is None else temperature)
    checks, findings = chosen(quick), []
    with console.progress("examining", total=len(checks), unit="checks") as bar:
        for check in checks:
            bar.describe(f"examining: {check.name}")
            found = examine(case, check)
            findings.append(replace(found, seen=in_flags(found.seen), remedy=in_flags(found.remedy)))
            bar.advance()
    if said.json:
        facts = {"run": str(target.path), "model": name, "verdict": worst(findings)}
        console.emit_json({**facts, "findings": [asdict(one) for one in findings]})
        return
    console.result(_table(findings))
    console.result(_summary(findings))


def _model_of(target: Run) -> str | None:
    """Returns the model that a run belongs to, None if its file is damaged: a check reports that."""
    try:
        found: str | None = target.model
    except UserError:
        return None
    return found


def _table(findings: "Sequence[Finding]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what was seen, and what helps", overflow="fold")
    for one in findings:
        seen = Text(visible(one.seen))
        if one.remedy:
            seen.append(f"\n-> {visible(one.remedy)}", style="cyan")
        table.add_row(one.name, Text(one.verdict, style=COLOURS[one.verdict]), seen)
    return table


def _summary(findings: "Sequence[Finding]") -> str:
    """Returns a line with the number of findings by verdict."""
    counts = {verdict: sum(one.verdict == verdict for one in findings) for verdict in ("bad", "warn", "unknown")}
    amiss = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"{len(findings)} checks: {', '.join(amiss) if amiss else 'nothing amiss'}"
