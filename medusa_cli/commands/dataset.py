"""What `train` and `calibrate` share: the engine and the data set that a drafter of a kind learns with."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_cli import console
from medusa_cli.errors import UsageError
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.drafters.heads import HeadDrafter
    from medusa_cli.training import Conversations, Dataset, World

# Whole conversations run through the backbone here, where decoding would run the few rows of a tree: both commands load
# it for so many rows at a time, as states are kept by its number type.
ROWS = 64


def engine_for(kind: "type[HeadDrafter]", train: TrainRecipe, engine: str) -> str:
    """The engine to load the backbone with; UsageError for --engine fast where whole conversations run through it."""
    from medusa_cli.training.build import runs_model

    if not runs_model(kind, train):
        return engine
    if engine not in ("auto", "eager"):
        raise UsageError(
            f"--engine fast cannot run {kind.name} over whole conversations: it packs the layers' weights",
            "leave --engine out; the drafter runs on either engine once it is trained",
        )
    return "eager"


def open_dataset(
    run: Run,
    backbone: "Backbone",
    kind: "type[HeadDrafter] | HeadDrafter",
    taps: Sequence[int],
    recipe: Recipe,
    *,
    prompts: bool,
    data: Path | None,
    fraction: float,
    together: "World | None" = None,
    sharded: bool = False,
    needed: "Callable[[list[str], set[str]], Collection[str]] | None" = None,
) -> "Dataset | Conversations":
    """What a drafter of a kind learns from or is measured on: answers with their cached states, or whole conversations.

    They are the run's (or those of the file `data`); a prefill, where one is needed, shows its progress. taps: the
    layers whose states it reads; prompts: whether its layers see those of prompts. together: the processes that share a
    prefill, or, sharded, the backbone. needed: of which conversations states are wanted, as `load_dataset` says.
    """
    from medusa_cli.training import load_dataset
    from medusa_cli.training.build import runs_model
    from medusa_cli.training.setup import whole_conversations

    if runs_model(kind, recipe.train):
        return whole_conversations(run, backbone, recipe, data, fraction)
    bars: list[console.Bar] = []
    with ExitStack() as stack:

        def begin(total: int) -> None:
            which = "prompts and answers" if prompts else "answers"
            console.info(f"computing the hidden states of {which}, once: {total:,} tokens to run")
            others = sum(one.stat().st_size for one in run.cache_dir.glob("states-*.bin"))
            if others:
                console.info(
                    f"{run.cache_dir} holds {others / 1e9:.2f} GB of states of other layers or other conversations; "
                    "delete those that nothing learns from any more"
                )
            bars.append(stack.enter_context(console.progress("hidden states", total=total, unit="tokens")))

        return load_dataset(
            run,
            backbone,
            data=data,
            fraction=fraction,
            taps=taps,
            prompts=prompts,
            on_total=begin,
            on_progress=lambda count: bars[0].advance(count),
            together=together,
            sharded=sharded,
            needed=needed,
        )
