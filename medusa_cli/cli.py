"""The `medusa` program: its commands, and the one place where errors become a line and an exit code."""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from medusa_cli import __version__, console
from medusa_cli.commands import assets, bench, bench_firp, calibrate, chat, compare, demo, distill, serve, train, tree
from medusa_cli.errors import OUT_OF_MEMORY, UserError, explain_os

INTERRUPTED = 130


class Boundary(TyperGroup):
    """Runs a command; what it raises ends as one line on stderr, with the traceback only under --debug."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run one command line and exit with its code; standalone_mode is accepted and ignored."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            # Typer answers Ctrl-C in a command with code 130 and says nothing.
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as reason:
            if "--debug" in words:
                traceback.print_exc()
            message, code = explain(reason)
            if isinstance(reason, typer.TyperException):
                message += f"; see `{self._asked(words)} --help`"
            console.error(message)
        if code == INTERRUPTED:
            console.err.print("interrupted", style="red")
        sys.exit(code or 0)

    def _asked(self, words: list[str]) -> str:
        """The command that was typed, as far as there is one of that name."""
        return " ".join(["medusa", *[word for word in words[:1] if word in self.commands]])


def explain(reason: Exception) -> tuple[str, int]:
    """What to tell the user about an exception, and the exit code."""
    match reason:
        case UserError():
            return str(reason), reason.exit_code
        case typer.TyperException():
            return reason.format_message().rstrip("."), reason.exit_code
        case typer.Abort():
            return "aborted", 1
        case OSError():
            return explain_os(reason), 1
        case _ if "No space left on device" in str(reason):  # safetensors and torch have their own types for it
            return "no disk space left; free some space or choose another --run, then run again", 1
        case _ if isinstance(reason, MemoryError) or "DefaultCPUAllocator" in str(reason):  # so torch says it
            return OUT_OF_MEMORY, 1
        case _ if type(reason).__name__ == "OutOfMemoryError":  # torch's, which must not be imported here
            return "the device is out of memory; use a smaller batch, --load-in-4bit, or --device cpu", 1
    said = f"{type(reason).__name__}: {reason}".removesuffix(": ")
    return f"internal error: {said} (run again with --debug for the traceback)", 1


# Plain help: "[default: ...]" in a help text is text, not markup, and rich's help is slow to import.
app = typer.Typer(
    name="medusa",
    cls=Boundary,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"medusa {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make a language model decode several tokens a step, with the same output.

    In order: distill -> train -> calibrate -> tree -> chat / bench. Each command finds in the run directory
    what the one before it wrote; `medusa demo` shows what comes of it.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS: dict[Any, str] = {
    distill.distill: "make training data in the model's own words",
    train.train: "train a drafter on it",
    calibrate.calibrate: "measure how often its guesses are right",
    tree.tree: "find the best tree of guesses",
    chat.chat: "chat, several tokens a step",
    serve.serve: "answer over HTTP, as OpenAI's API does",
    bench.bench: "measure speedup, acceptance and overhead",
    compare.compare: "several trainings side by side",
    assets.assets: "fetch the default model and the data",
    demo.demo: "plain and drafted decoding side by side",
}
for command, summary in COMMANDS.items():
    app.command(short_help=summary)(command)
# A measurement of one drafter's design: `make bench-firp` runs it.
app.command(hidden=True)(bench_firp.bench_firp)


def main() -> None:
    """The console script."""
    app()
