"""The `medusa` program: its commands, and the one place where errors become a line and an exit code."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from medusa_cli import __version__, extras
from medusa_cli.errors import INTERRUPTED, OUT_OF_MEMORY, UserError, in_flags

# Each is the function of its name in the file of its name in commands/, which is imported when the command is typed;
# one that is a word of Python's has an underscore there.
COMMANDS = {
    "distill": "make training data in the model's own words",
    "merge": "several distillations as one run's data",
    "train": "train a drafter on it",
    "calibrate": "measure how often its guesses are right",
    "tree": "find the best tree of guesses",
    "chat": "chat, several tokens a step",
    "serve": "answer over HTTP, as OpenAI's API does",
    "bench": "measure speedup, acceptance and overhead",
    "report": "what was measured as one page, charts and tables",
    "compare": "several trainings side by side",
    "doctor": "why is acceptance low? faults of a run, and what helps",
    "machine": "what this machine is fast at, and what auto takes",
    "export": "write a drafter for transformers, vLLM and others",
    "import": "take in a drafter that was trained elsewhere",
    "assets": "fetch the default model and the data",
    "demo": "plain and drafted decoding side by side",
}


def function_of(name: str) -> Any:
    """The function behind a command's name, its options one by one."""
    from medusa_cli.options import spread_out

    word = name.replace("-", "_") + ("_" if iskeyword(name) else "")
    return spread_out(getattr(import_module(f"medusa_cli.commands.{word}"), word))


class _Commands(Mapping[str, Any]):
    """All commands by name, each made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(name, short_help=COMMANDS.get(name))(function_of(name))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        yield from COMMANDS

    def __len__(self) -> int:
        return len(COMMANDS)


class Boundary(TyperGroup):
    """Runs a command; what it raises ends as one line on stderr, with the traceback only under --debug."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**{**attrs, "commands": _Commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, without importing what is behind them."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table of commands for --help, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

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
            code = self._fail(reason, words)
        if code == INTERRUPTED:
            from medusa_cli import console

            console.err.print("interrupted", style="red")
        sys.exit(code or 0)

    def _fail(self, reason: Exception, words: list[str]) -> int:
        """Say what went wrong; the exit code."""
        from medusa_cli import console

        if "--debug" in words:
            console.trace()
        message, code = explain(reason)
        if isinstance(reason, typer.TyperException):
            message += f"; see `{self._asked(words)} --help`"
        console.error(message)
        return code

    def _asked(self, words: list[str]) -> str:
        """The command that was typed, as far as there is one of that name."""
        return " ".join(["medusa", *[word for word in words[:1] if word in self.commands]])


def explain(reason: Exception) -> tuple[str, int]:
    """What to tell the user about an exception, and the exit code."""
    match reason:
        case UserError():
            return in_flags(reason), reason.exit_code
        case typer.TyperException():
            return reason.format_message().rstrip("."), reason.exit_code
        case typer.Abort():
            return "aborted", 1
        case OSError():
            return in_flags(reason), 1
        case ModuleNotFoundError() if said := extras.named(reason.name):
            return said, 1
        case _ if "No space left on device" in str(reason):  # safetensors and torch have their own types for it
            return "no disk space left; free some space or choose another --run, then run again", 1
        case _ if isinstance(reason, MemoryError) or "DefaultCPUAllocator" in str(reason):  # so torch says it
            return in_flags(OUT_OF_MEMORY), 1
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


def main() -> None:
    """The console script."""
    app()
