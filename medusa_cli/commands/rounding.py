"""A backbone rounded as it was when a drafter was trained on it: later commands follow, or say what they do instead."""

from pathlib import Path
from typing import Any

from medusa_cli import console
from medusa_cli.runs.run import rounding_in


def follow_choice(choice: Any, place: dict[str, Any]) -> dict[str, Any]:
    """As `follow`, for the drafter that was chosen, or that of the chosen run, whose model is decoded plainly."""
    folder = choice.drafter or (choice.run.drafter_dir if choice.run else None)
    return place if folder is None else follow(folder, place)


def follow(folder: Path, place: dict[str, Any]) -> dict[str, Any]:
    """Where and how to load the backbone of the drafter in a folder, with load_in_4bit and load_in_8bit settled.

    Flags that were given, either way, are obeyed; without any the weights are rounded as they were in training.
    """
    from medusa_cli.engines.kernels import BITS

    flags = {"4bit": place.get("load_in_4bit"), "8bit": place.get("load_in_8bit")}
    asked = next((how for how, given in flags.items() if given), None)
    made = rounding_in(folder)
    if made is not None and asked != made:
        if all(given is None for given in flags.values()) and place.get("engine") not in BITS:
            console.info(
                f"loading the model in {made}, as {folder} was trained on it; --no-load-in-{made} loads it whole"
            )
            asked = made
        else:
            warn_of(folder, asked)
    return {**place, "load_in_4bit": asked == "4bit", "load_in_8bit": asked == "8bit"}


def warn_of(folder: Path, rounding: str | None) -> None:
    """Warn where a drafter was trained on weights rounded in another way than the backbone's now."""
    made = rounding_in(folder)
    if made is not None and made != rounding:
        console.warn(
            f"{folder} was trained on the model in {made}: its guesses, and an adapter beside it, are not made for "
            f"other weights; --load-in-{made} loads those"
        )
