"""`medusa tune`: makes a model faster in a given time."""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_cli import console
from medusa_cli.commands.bench import show
from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import extras
from medusa_cli.files.io import read_object
from medusa_cli.files.model_files import check_chat_template, check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.paths import expanded
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.progress import span
from medusa_cli.runs.resolve import is_drafter
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.tune.tuning import Tuning

_MODEL = "Your model: a name, a folder (of a model or a LoRA adapter), a GGUF file, or a Hugging Face id."
_TIME = "The time for all of the work, such as 30m, 1h30m or 90s."
_DATA = (
    "Your own prompts or conversations: a JSON or JSONL file, a .txt file with one prompt per line, or the file of "
    "`medusa serve --record`. [default: ShareGPT; for models that write code, half of the prompts are about code]"
)
_RUN = "The run to write. [default: named after MODEL, with -tuned]"
_ENDPOINT = "Servers that run the model and answer the prompts instead of this machine, as in `medusa distill`."
_DRY_RUN = "Measure and plan only; write nothing."


def tune(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    time: Annotated[str, flag("--time TIME", _TIME, show_default=True)] = "1h",
    data: Annotated[Path | None, flag("--data FILE", _DATA, dir_okay=False)] = None,
    run: Annotated[str | None, flag("--run NAME", _RUN)] = None,
    endpoint: Annotated[str | None, flag("--endpoint URL[,URL]", _ENDPOINT)] = None,
    dry_run: Annotated[bool, flag("--dry-run", _DRY_RUN)] = False,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Make a model faster in a given time: distill, train, calibrate, and choose drafter and tree by measured speed.

    Measures this machine first, and says what to expect. Training starts from the included drafter
    of a related model if enough of its drafts are accepted. Ctrl-C stops the work; the same command
    continues it, also with a longer --time. The answers are those of plain decoding, as the last
    table shows.
    """
    printing.configure()
    from medusa_cli.tune.plan import parse_time

    seconds = parse_time(time)
    extras.need_extra("train", "`medusa tune`")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "`medusa tune` is one process, which uses one GPU",
            "start it without torchrun, or use `medusa distill` and `medusa train` with it",
        )
    if endpoint is not None:
        from medusa_cli.files.chat_servers import ChatServers

        ChatServers(endpoint.split(",")).check()
    source = checked(model)
    from medusa_cli.tune.tuning import Tuning, default_run

    target = default_run(model) if run is None else Run(Run.folder(run))
    tuning = Tuning(target, source, loading, seconds, data, endpoint, dry_run)
    if tuning.state.used_s:
        console.info(f"{target.path}: continues after {span(tuning.state.used_s)}")
    with console.terminated():
        tuning.work()
    if printing.json:
        facts = {"run": str(target.path), "options": options_of(tuning)}
        console.emit_json({**facts, **asdict(tuning.state)})
    elif not dry_run:
        show_end(tuning)


def checked(model: str) -> ModelSource:
    """Returns the source of a model; raises UserError for a drafter's folder, and for a model that cannot be tuned."""
    config = expanded(model) / "config.json"
    if config.is_file() and is_drafter(read_object(config)):
        raise UserError(
            f"{model} is a drafter, not a model",
            f"use it as it is: medusa chat --drafter {shlex.quote(model)} --model MODEL",
        )
    source = ModelSource.of(model)
    if source.kind == "random":
        raise UserError(f"{model} has no tokenizer", "give a model with weights and a tokenizer")
    check_model_files(source)
    check_chat_template(source)
    return source


def options_of(tuning: "Tuning") -> str:
    """Returns the options with which `medusa chat` and `serve` decode by the method that was chosen."""
    model = f"--model {shlex.quote(tuning.model.name)}"
    run = f"--run {tuning.run.argument}"
    start = tuning.state.measured.start if tuning.state.measured else None
    words = {
        "ar": f"{model} --baseline",
        "lookup": f"{model} --lookup",
        "mtp": f"{model} --drafter mtp",
        "start": f"{model} --drafter {shlex.quote(Path(start or '').name)}",
        "tuned": run,
        "tuned-static": f"{run} --tree static",
    }
    return words[tuning.state.chosen or "lookup"]


def show_end(tuning: "Tuning") -> None:
    """Prints the closing screen: before and after, identity, acceptance by position, and what to do next."""
    from medusa_cli.tune.measuring import NAMES

    state = tuning.state
    if state.after is not None:
        show(state.after)
        chosen = state.after["methods"][state.chosen]
        shares = [f"{100 * row['reached']:.0f} %" for row in chosen["by_position"]]
        console.result(f"accepted at draft positions 1, 2, ...: {', '.join(shares) or 'none'}")
        console.result(
            f"fastest: {NAMES[str(state.chosen)]}, {chosen['speedup']:.2f} x plain decoding (expected: "
            f"{state.promised:.2f} x), {chosen['identical']} of {chosen['questions']} answers the same, after "
            f"{span(state.used_s)}; {tuning.outlook(chosen['speedup'])}"
        )
    console.result(f"Next: medusa chat {options_of(tuning)}")
    console.result(f"      medusa serve {options_of(tuning)}")
