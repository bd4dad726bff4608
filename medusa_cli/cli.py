"""The `medusa` program, which imports the requested command and turns errors into one line and an exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from medusa_cli import __version__
from medusa_cli.errors import (
    INTERRUPTED,
    OUT_OF_MEMORY,
    UserError,
    in_flags,
    is_out_of_memory,
    of_system,
)
from medusa_cli.files import process
from medusa_cli.files.cpus import limit_threads

# Each command is a function in the file of the same name in commands/. If the name is a Python
# keyword, an underscore follows it in Python.
COMMANDS = {
    "distill": "make training data in the model's own words",
    "train": "train a drafter on it",
    "calibrate": "measure how often its guesses are right",
    "tree": "find the best tree of guesses",
    "tune": "all of these in a given time: a model in, a faster one out",
    "chat": "chat, several tokens per step",
    "serve": "answer over HTTP, as OpenAI's API does",
    "bench": "measure speedup, acceptance and overhead",
    "report": "measurements as one page, charts and tables",
    "compare": "several trainings side by side",
    "doctor": "why is acceptance low? faults of a run, and remedies",
    "machine": "which kernels are fast on this machine",
    "export": "write a drafter for transformers, vLLM and others",
    "import": "import a drafter that was trained elsewhere",
    "assets": "fetch the default model and the data",
    "demo": "plain and drafted decoding side by side",
}


def function_of(name: str) -> Any:
    """Returns a command's function, with its groups of options spread out into single parameters."""
    from medusa_cli.options import spread_out

    return spread_out(getattr(module_of(name), word_of(name)))


def module_of(name: str) -> Any:
    """Imports and returns a command's module."""
    return import_module(f"medusa_cli.commands.{word_of(name)}")


def word_of(name: str) -> str:
    """Returns the Python name of a command's module and function."""
    return f"{name}_" if iskeyword(name) else name


class Command(TyperCommand):
    """Lists in a command's help first the command's own options, then shared options by panel, then extra sections."""

    sections: dict[str, list[tuple[str, str]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section of options per panel, then the extra sections."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(
                    record
                )
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
        for title, rows in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def load_command(name: str) -> Any:
    """Imports a command and returns it in the form that typer runs."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=Command)(function_of(name))
    command: Any = typer.main.get_command(app)
    command.sections = getattr(module_of(name), "help_sections", dict)()
    return command


class ErrorBoundary(TyperGroup):
    """Runs a command and reports an exception in one line on stderr; with --debug, a traceback comes first."""

    def __init__(self, **attrs: Any) -> None:
        # The requested command is imported later.
        super().__init__(**{**attrs, "commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, name: str) -> Any:
        return load_command(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the table of commands for --help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Runs one command line and exits with its exit code."""
        words = list(sys.argv[1:] if args is None else args)
        if sys.platform == "win32":
            sys.exit(
                "error: medusa runs on Linux (macOS is untested); on Windows, install it in WSL"
            )
        try:
            # Typer turns Ctrl-C in a command into exit code 130, without a message.
            code = super().main(words, *rest, **{**options, "standalone_mode": False})
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as reason:
            from medusa_cli import console

            if "--debug" in words:
                console.trace()
            message, code = explain(reason)
            if isinstance(reason, typer.TyperException):
                name = f" {words[0]}" if words and words[0] in COMMANDS else ""
                message += f"; see `medusa{name} --help`"
            console.error(message)
        if code == INTERRUPTED:
            from medusa_cli import console

            goes_on = words[:1] in (["distill"], ["tune"]) or (
                words[:1] == ["bench"] and "--sweep" in words
            )
            hint = "; the same command resumes it" if goes_on else ""
            console.err.print(f"interrupted{hint}", style="red")
        sys.exit(code or 0)


def explain(reason: Exception) -> tuple[str, int]:
    """Returns an exception's message for the user, and the exit code."""
    from medusa_cli.files.extras import missing_package

    match reason:
        case UserError():
            return in_flags(reason.text), reason.exit_code
        case typer.TyperException():
            return reason.format_message().rstrip("."), reason.exit_code
        case typer.Abort():
            return "aborted", 1
        case OSError():
            return in_flags(of_system(reason).text), 1
        case ModuleNotFoundError() if message := missing_package(reason.name):
            return message, 1
        # safetensors and torch raise exceptions of their own types for a full disk.
        case _ if any(
            os.strerror(fault) in str(reason) for fault in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        ):
            return "no disk space left; free some space or choose another --run, then run again", 1
        case _ if is_out_of_memory(reason):
            return in_flags(OUT_OF_MEMORY), 1
    text = f"{type(reason).__name__}: {reason}".removesuffix(": ")
    return f"internal error: {text} (run again with --debug for the traceback)", 1


# Help is plain text: rich would read "[default: ...]" as markup, and rich's help is slow to import.
app = typer.Typer(
    name="medusa",
    cls=ErrorBoundary,
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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Make a language model decode several tokens per step, with the same output.

    In order: distill -> train -> calibrate -> tree -> chat / bench. Each command finds in the run directory
    what the one before it wrote. `medusa tune` does all of it in a given time; `medusa demo` shows the result.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    process.owned = True
    limit_threads()
    app()
