"""What every command that decodes begins with: load what was chosen, and say in one line what it is.

A backbone is rounded as it was when the drafter was trained on it: commands follow, or say what they do instead.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.commands.groups import Where
from medusa_cli.runs.resolve import Choice
from medusa_cli.runs.run import rounding_in

if TYPE_CHECKING:
    from medusa_cli.assembly import Assembled


def load(choice: Choice, place: Where) -> "Assembled":
    """Assemble with a bar for what is timed on the way, and greet; errors as assembly's."""
    from medusa_cli.assembly import assemble

    with console.progress("timing steps", unit="steps") as bar:
        found = assemble(choice, **place.loading, on_progress=bar.advance)
    console.info(place.of(found.words))
    return found


def follow_choice(choice: Choice, place: Where) -> Where:
    """As `follow`, for the drafter that was chosen, or that of the chosen run, whose model is decoded plainly."""
    folder = choice.drafter or (choice.run.drafter_dir if choice.run else None)
    return place if folder is None else follow(folder, place)


def follow(folder: Path, place: Where) -> Where:
    """Where and how to load the backbone of the drafter in a folder, with load_in_4bit and load_in_8bit settled.

    Flags that were given, either way, are obeyed; without any the weights are rounded as they were in training.
    """
    from medusa_cli.engines.kernels import BITS

    flags = {"4bit": place.load_in_4bit, "8bit": place.load_in_8bit}
    if all(flags.values()):
        return place  # the loader says that they exclude each other
    asked = next((how for how, given in flags.items() if given), None)
    made = rounding_in(folder)
    if made is not None and asked != made:
        if all(given is None for given in flags.values()) and place.engine not in BITS:
            console.info(
                f"loading the model in {made}, as {folder} was trained on it; --no-load-in-{made} loads it whole"
            )
            asked = made
        else:
            warn_of(folder, asked)
    return replace(place, load_in_4bit=asked == "4bit", load_in_8bit=asked == "8bit")


def warn_of(folder: Path, rounding: str | None) -> None:
    """Warn where a drafter was trained on weights rounded in another way than the backbone's now."""
    made = rounding_in(folder)
    if made is not None and made != rounding:
        console.warn(
            f"{folder} was trained on the model in {made}: its guesses, and an adapter beside it, are not made for "
            f"other weights; --load-in-{made} loads those"
        )
