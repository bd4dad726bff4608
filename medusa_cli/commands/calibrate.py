"""`medusa calibrate`: how often each head's i-th guess is right on held-out conversations."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medusa_cli import console, extras, options
from medusa_cli.errors import UserError
from medusa_cli.options import LoadFlags, OutputFlags
from medusa_cli.runs.accuracies import STAMP, stamp_of
from medusa_cli.runs.run import DEFAULT_RUN

if TYPE_CHECKING:
    from medusa_cli.data.packing import Conversation, Example
    from medusa_cli.train import Calibration

# Held-out conversations that a drafter is measured on which must run the model for them: 22,000 tokens, a few minutes.
WHOLE = 100


def calibrate(
    asked: typer.Context,
    *,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    drafter: options.Drafter = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Conversations never trained on, all of them used. [default: those held out in training]",
        ),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Guesses of each head to measure.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Where to save it. [default: the run's calibration.json; nowhere with --drafter, or --data beside "
            "conversations of the run's own]",
        ),
    ] = None,
    max_samples: options.MaxSamples = None,
    place: LoadFlags,
    said: OutputFlags,
) -> None:
    """Measure the accuracy of every head's best guesses, from which `medusa tree` builds its tree.

    Writes RUN/calibration.json and the heat map calibration.png. Typed bare it uses the conversations that
    `medusa train` held out. What another drafter comes to, or other conversations than the run has, is shown, and
    saved where --output says: the run's own calibration, which `medusa tree` builds on, stays.
    """
    from medusa_cli.drafters import drafter_kind
    from medusa_cli.runs.io import write_json
    from medusa_cli.runs.provenance import describe_drafter
    from medusa_cli.runs.recipe import load_recipe
    from medusa_cli.runs.run import Run, provenance, sole_writer

    said.configure()
    target = Run.open(run)
    recipe = load_recipe(target.recipe_path if target.recipe_path.is_file() else None)
    name = model or target.model or recipe.model
    own = drafter is None or drafter.resolve() == target.drafter_dir.resolve()
    folder = drafter or target.drafter_dir
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no drafter", "run `medusa train` first, or give another --drafter or --run")
    # Where the run has no conversations of its own, others are all that its tree can be built on.
    aside = not own or (data is not None and target.data_path.is_file())
    output = output or (None if aside else target.calibration_path)
    if output == target.calibration_path:
        asked.with_resource(sole_writer(target.path, "medusa calibrate", console.warn))
    made = describe_drafter(folder).provenance
    # A run that learnt from conversations elsewhere has none of its own.
    learnt = made.data.path if made.data is not None and not target.data_path.is_file() else None
    source = data or (Path(learnt) if learnt else target.data_path)
    if max_samples is None and data is None and drafter_kind(folder).uses_verify_pass:
        max_samples = WHOLE
    part = "" if data else "the held-out part of "
    bound = f"{max_samples:,} conversations" if max_samples else "--data FILE takes others, --max-samples N fewer"
    console.info(f"Calibrating {folder} for {place.of(name)} on {part}{source}, top {top} guesses a head; {bound}")

    from medusa_cli.commands.train import ROWS, engine_for, open_dataset
    from medusa_cli.drafters import load_drafter
    from medusa_cli.engine import load_backbone
    from medusa_cli.options import follow
    from medusa_cli.train.calibration import calibrate as measure
    from medusa_cli.train.log import draw_heat_map

    place = replace(place, engine=engine_for(drafter_kind(folder), recipe.train, place.engine))
    backbone = load_backbone(
        name,
        follow(folder, place),
        adapter=target.adapter if own else None,
        chat_template=target.chat_template,
        rows=ROWS,
    )
    target.bind(backbone.identity)
    heads = load_drafter(folder, backbone)
    fraction = 0.0 if data else made.held_out(recipe.train.validation_fraction)
    prompts = heads.sees_prompt(heads.config)

    def measured(ids: list[str], out: set[str]) -> list[str]:
        return [one for one in ids if data or one in out][:max_samples]

    dataset = open_dataset(
        target, backbone, heads, heads.taps, recipe, prompts=prompts, data=source, fraction=fraction, needed=measured
    )
    answers = _first(dataset.train if data else dataset.held_out, max_samples)
    with console.progress("calibrating", total=sum(one.positions for one in answers), unit="tokens") as bar:
        found = measure(backbone, heads, dataset, top=top, answers=answers, on_progress=bar.advance)
    document = {
        **provenance(backbone.identity, data={"path": str(source), "digest": dataset.digest}, drafter=str(folder)),
        STAMP: stamp_of(folder),
        "accuracies": found.accuracies,
        "temperatures": found.temperatures,
        "heads": heads.num_heads,
        "top": top,
        "positions": found.positions,
        "answers": found.answers,
    }
    if said.json:
        console.emit_json(document)
    console.result(_table(found))
    heat = ", ".join(f"{one:.2f}" for one in found.temperatures)
    console.result(f"temperatures at which the heads' confidences fit: {heat}")
    if output is None:
        console.result(f"not saved; give --output FILE to keep it, {target.calibration_path} for `medusa tree`")
        return
    picture = output.with_suffix(".png")
    write_json(output, document)
    if extras.has("matplotlib"):
        draw_heat_map(found.accuracies, picture, f"{target.name}: how often guess i is right")
    following = f"--run {run}" if output == target.calibration_path else f"--calibration {output}"
    written = f"{output} and {picture}" if extras.has("matplotlib") else f"{output}"
    console.result(f"{written}. Next: medusa tree {following} --budget 64")


def _first(answers: Sequence["Example | Conversation"], samples: int | None) -> "list[Example | Conversation]":
    """The answers of the first `samples` conversations."""
    kept = list(dict.fromkeys(one.id for one in answers))[:samples]
    chosen = set(kept)
    return [one for one in answers if one.id in chosen]


def _table(found: "Calibration") -> Table:
    top = len(found.accuracies[0])
    title = f"Accuracy of each head's top {top} guesses on {found.positions:,} held-out tokens, %"
    rows = (
        [str(head), *(f"{100 * value:.1f}" for value in (*row, sum(row)))]
        for head, row in enumerate(found.accuracies, 1)
    )
    return console.grid(title, ["head", *(str(guess + 1) for guess in range(top)), "sum"], rows)
