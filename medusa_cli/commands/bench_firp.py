"""`medusa bench-firp`: where FIRP's pseudo states had best enter this model, as the paper's Figures 5 to 7 ask."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from medusa_cli import console, options
from medusa_cli.commands.groups import Said, Where, but
from medusa_cli.runs.run import DEFAULT_RUN

if TYPE_CHECKING:
    from medusa_cli.training.trials import Trial

TITLES = {
    5: "head 1 by its layer",
    6: "head 2 by its layer, head 1 at half the depth",
    7: "head 2 with the first pseudo state in sight, or masked",
}


def bench_firp(
    *,
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Settings such as train.lr=1e-3.")
    ] = None,
    run: options.Run = DEFAULT_RUN,
    model: options.Model = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Conversations. [default: the run's distill.jsonl]"),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Answer tokens each choice is trained on.")] = 20_000,
    figure: Annotated[int | None, typer.Option(metavar="N", help="5, 6 or 7 alone. [default: all]")] = None,
    place: Annotated[Where, but("engine", "load_in_4bit", "load_in_8bit")],
    said: Said,
) -> None:
    """Train FIRP heads shortly at one choice of layers after another and compare their held-out accuracy.

    Writes RUN/bench/firp-layers.json. The trainings are short, all alike: they rank the choices, and that is all.
    """
    from medusa_cli.errors import UsageError
    from medusa_cli.runs.files import write_json
    from medusa_cli.runs.recipe import load_recipe
    from medusa_cli.runs.run import Run, provenance
    from medusa_cli.training.build import check_drafter

    said.configure()
    if figure is not None and figure not in TITLES:
        raise UsageError(f"--figure {figure} is none of these", "use 5, 6 or 7")
    target = Run.open(run, create=data is not None)
    settings = [*(recipe or []), f"train.max_tokens={tokens}", "train.checkpoint_every=1000000"]
    plan = load_recipe(None, ["drafter=firp", *settings])
    check_drafter(plan)
    name = model or target.model or plan.model
    source = data or target.data_path
    console.info(
        f"Trying FIRP's layers on {place.of(name)} with {tokens:,} tokens of {source} each; --tokens N takes more"
    )

    from medusa_cli.engines import load_backbone
    from medusa_cli.training.setup import whole_conversations
    from medusa_cli.training.trials import figures, try_layers

    template = target.chat_template
    backbone = load_backbone(name, **place.network, engine="eager", gradients=True, chat_template=template)
    target.bind(backbone.identity)
    dataset = whole_conversations(target, backbone, plan, data, plan.train.validation_fraction)
    chosen = {key: one for key, one in figures(backbone.num_layers).items() if figure in (None, key)}
    found: dict[int, list[Trial]] = {}
    with console.progress("training", total=tokens * sum(map(len, chosen.values())), unit="tokens") as bar:
        for key, choices in chosen.items():
            found[key] = list(try_layers(backbone, dataset, plan, choices, bar.advance))
    document = {
        **provenance(backbone.identity, data={"path": str(source), "digest": dataset.digest}),
        "tokens": tokens,
        "figures": {str(key): [vars(trial) for trial in trials] for key, trials in found.items()},
    }
    if said.json:
        console.emit_json(document)
    for key, trials in found.items():
        console.result(_table(key, trials))
    path = target.bench_dir / "firp-layers.json"
    write_json(path, document)
    console.result(str(path))


def _table(figure: int, trials: "list[Trial]") -> Table:
    layers = [", ".join(map(str, trial.layers)) + (" masked" if trial.masked else "") for trial in trials]
    numbers = [(f"{trial.losses[-1]:.3f}", f"{100 * trial.accuracies[-1]:.1f}") for trial in trials]
    rows = [(name, *row) for name, row in zip(layers, numbers, strict=True)]
    return console.grid(f"Figure {figure}: {TITLES[figure]}", ("layers", "held-out loss", "top-1, %"), rows)
