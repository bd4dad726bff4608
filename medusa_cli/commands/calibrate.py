"""`medusa calibrate`: measures how often each head's i-th guess is right on held-out conversations."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from medusa_cli import console, options
from medusa_cli.errors import UserError
from medusa_cli.files import extras
from medusa_cli.files.io import Document, write_json
from medusa_cli.files.model_files import check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.options import LoadFlags, OutputFlags, flag
from medusa_cli.runs.load_options import as_trained
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.resolve import named_drafter
from medusa_cli.runs.run import DEFAULT_RUN, Run, sole_writer

_DATA = "A file of conversations that training did not use. [default: those that training held out]"
_OUTPUT = (
    "The file to which the calibration is saved. [default: the run's calibration.json; none with --drafter, or with "
    "--data if the run has its own conversations]"
)


def calibrate(
    ctx: typer.Context,
    *,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    drafter: options.Drafter = None,
    data: Annotated[Path | None, flag("--data FILE", _DATA, dir_okay=False)] = None,
    top: Annotated[
        int,
        flag("--top N", "Number of guesses to measure for each head.", min=1, show_default=True),
    ] = 10,
    file: Annotated[Path | None, flag("--output FILE", _OUTPUT, dir_okay=False)] = None,
    max_samples: options.MaxSamples = None,
    loading: LoadFlags,
    printing: OutputFlags,
) -> None:
    """Measure how often each head's best guesses are right; `medusa tree` builds its tree from these accuracies.

    Writes RUN/calibration.json and the heat map calibration.png. Without options, it uses the conversations that
    `medusa train` held out. The accuracies of another drafter, or on other conversations, are shown, but saved only
    with --output: they do not replace the run's own calibration, which `medusa tree` uses.
    """
    printing.configure()
    options.check_beside_picture(file)
    target = Run.open(run)
    recipe = load_recipe(target.recipe_path if target.recipe_path.is_file() else None)
    source = ModelSource.of(model or target.model or recipe.model)
    folder = named_drafter(drafter, source) or target.drafter_dir
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds no drafter",
            f"run `medusa train --run {target.argument}` first, or give another --drafter or --run",
        )
    # A calibration on other data becomes the run's own only if the run has no conversations.
    aside = folder.resolve() != target.drafter_dir.resolve() or (
        data is not None and target.data_path.is_file()
    )
    file = file or (None if aside else target.calibration_path)
    if file == target.calibration_path:
        ctx.with_resource(sole_writer(target.path, "medusa calibrate"))
    if data is not None:
        from medusa_cli.data.conversation import check_conversations

        check_conversations(data)
    check_model_files(source)
    console.info(f"loading {loading.of(source.name)}")

    from medusa_cli.train.calibration import calibrate as measure

    with console.bars() as show:
        document = measure(
            target,
            source,
            folder,
            as_trained(loading, folder),
            data=data,
            top=top,
            max_samples=max_samples,
            show=show,
        )
    if printing.json:
        console.emit_json(document)
    _show(document)
    if file is None:
        console.result(
            f"not saved; give --output FILE to keep it, {target.calibration_path} for `medusa tree`"
        )
    else:
        _save(document, file, target)


def _show(document: Document) -> None:
    """Prints the accuracies and the temperatures of a calibration."""
    accuracies = document["accuracies"]
    heat = ", ".join(f"{value:.2f}" for value in document["temperatures"])
    rows = (
        [str(head), *(f"{100 * value:.1f}" for value in (*row, sum(row)))]
        for head, row in enumerate(accuracies, 1)
    )
    top = len(accuracies[0])
    title = (
        f"Accuracy of each head's top {top} guesses on {document['positions']:,} held-out tokens, %"
    )
    console.result(console.grid(title, ["head", *map(str, range(1, top + 1)), "sum"], rows))
    console.result(f"temperatures at which the heads' confidences fit: {heat}")


def _save(document: Document, file: Path, target: Run) -> None:
    """Writes a calibration, and its heat map if matplotlib is installed; prints the names of the files."""
    from medusa_cli.train.log import draw_heat_map

    write_json(file, document)
    written = [str(file)]
    if extras.has_package("matplotlib"):
        picture = file.with_suffix(".png")
        written.append(str(picture))
        title = f"{target.name}: how often guess i is right"
        draw_heat_map(document["accuracies"], picture, title)
    if file == target.calibration_path:
        following = f"--run {target.argument}"
    else:
        following = f"--calibration {shlex.quote(str(file))}"
    console.result(f"{' and '.join(written)}. Next: medusa tree {following} --budget 64")
