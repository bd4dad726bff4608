"""Logging of training events to TensorBoard, Weights & Biases or Trackio, in addition to the run's own log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from medusa_cli.files.io import read_object, write_json
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.run import Run
from medusa_cli.train.log import Logged, Saved, Validated

PROJECT = "medusa"
Send = Callable[[dict[str, float], int], None]
OnEvent = Callable[[Logged], None]


@contextmanager
def logger_of(
    name: str | None, run: Run, recipe: Recipe, resumed_at: int | None = None
) -> Iterator[OnEvent]:
    """Yields a function that sends training events to a logger of LOGGERS; without a name, the function does nothing.

    resumed_at: the step of the checkpoint from which the training resumes.
    """
    if name is None:
        yield lambda event: None
        return
    with LOGGERS[name](run, recipe, resumed_at) as send:
        yield (
            lambda event: None if isinstance(event, Saved) else send(metrics_of(event), event.step)
        )


def metrics_of(event: Logged) -> dict[str, float]:
    """Returns an event's figures by name: train/loss, held_out/acceptance, train/accuracy_1 (for head 1) and so on."""
    group = "held_out" if isinstance(event, Validated) else "train"
    figures: dict[str, Any] = asdict(event)
    if isinstance(event, Validated):
        figures["acceptance"] = event.acceptance
    metrics: dict[str, float] = {}
    for key, value in figures.items():
        if isinstance(value, list):
            metrics |= {
                f"{group}/{_SINGULAR[key]}_{head}": number
                for head, number in enumerate(value, 1)
                if number is not None
            }
        elif isinstance(value, dict):
            metrics |= {f"{group}/{part}": number for part, number in value.items()}
        elif key not in ("step", "steps"):
            metrics[f"{group}/{key}"] = value
    return metrics


_SINGULAR = {"accuracies": "accuracy", "head_losses": "loss"}


@contextmanager
def _tensorboard(run: Run, recipe: Recipe, resumed_at: int | None) -> Iterator[Send]:
    from torch.utils.tensorboard import SummaryWriter

    # Steps after the checkpoint are run again, so their earlier entries in the log are hidden.
    first = None if resumed_at is None else resumed_at + 1
    with SummaryWriter(str(run.path / "tensorboard"), purge_step=first) as writer:
        writer.add_text("recipe", f"```yaml\n{recipe.to_yaml()}```")

        def send(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield send


@contextmanager
def _wandb(run: Run, recipe: Recipe, resumed_at: int | None) -> Iterator[Send]:
    import wandb

    kept = run.path / "wandb.json"
    known = read_object(kept).get("id") if resumed_at is not None and kept.is_file() else None
    with wandb.init(
        project=PROJECT,
        name=run.name,
        dir=str(run.path),
        config=recipe.to_dict(),
        id=known,
        resume="allow" if known else None,
    ) as session:
        write_json(kept, {"id": session.id})
        yield lambda metrics, step: session.log(metrics, step=step)


@contextmanager
def _trackio(run: Run, recipe: Recipe, resumed_at: int | None) -> Iterator[Send]:
    import trackio

    goes_on = "allow" if resumed_at is not None else "never"
    trackio.init(project=PROJECT, name=run.name, config=recipe.to_dict(), resume=goes_on)
    try:
        yield lambda metrics, step: trackio.log(metrics, step=step)
    finally:
        trackio.finish()


# The keys are the names of the extras that install the packages.
LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
