"""Options that go together are one parameter of a command, and one option each on the command line."""

from inspect import signature
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

from medusa_cli import options
from medusa_cli.options import LoadFlags, OutputFlags, but, follow, spread_out


def shout(
    asked: typer.Context,
    *,
    word: Annotated[str, typer.Option(help="What.")] = "a",
    place: Annotated[LoadFlags, but("engine", "load_in_4bit", "load_in_8bit")],
    said: OutputFlags,
) -> None:
    """Shout."""
    typer.echo(f"{asked.info_name} {word} {place.device} {place.engine} {place.trust_remote_code} {said.json}")


def test_a_command_gets_what_the_command_line_says() -> None:
    app = typer.Typer()
    app.command()(spread_out(shout))
    said = CliRunner().invoke(app, ["--word", "b", "--device", "cuda:1", "--trust-remote-code", "--json"])
    assert said.stdout == "shout b cuda:1 auto True True\n"
    assert CliRunner().invoke(app, ["--device", "gpu"]).exit_code == 2
    assert CliRunner().invoke(app, ["--engine", "fast"]).exit_code == 2


def test_fields_stand_in_their_parameters_place_as_the_options_they_are() -> None:
    found = signature(spread_out(shout)).parameters
    assert list(found) == ["asked", "word", "device", "dtype", "trust_remote_code", "json", "quiet", "debug"]
    assert found["dtype"].annotation == options.Dtype and found["dtype"].default == "auto"


def test_two_ways_of_rounding_are_left_to_the_loader_to_refuse(tmp_path: Path) -> None:
    both = LoadFlags(load_in_4bit=True, load_in_8bit=True)
    assert follow(tmp_path, both) == both


def test_what_nobody_asked_to_be_rounded_is_loaded_whole() -> None:
    assert LoadFlags().loading.load_in_4bit is False and LoadFlags(load_in_8bit=True).loading.load_in_8bit is True
