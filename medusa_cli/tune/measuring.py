"""Compares the decoding methods of a model, and times the parts of a tuning on this machine."""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from medusa_cli.bench.bench import Bench
from medusa_cli.bench.questions import Question
from medusa_cli.decode import Sampling
from medusa_cli.decode.step_times import step_times_for
from medusa_cli.drafters import load_drafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files import mtp_layer
from medusa_cli.files.io import Document
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model import Backbone
from medusa_cli.runs.load_options import LoadOptions
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.resolve import Choice, choose, read_calibration, shipped_by_shape
from medusa_cli.runs.run import Run, stamp_of
from medusa_cli.train import calibrate, estimate
from medusa_cli.tree.search import StepTimes
from medusa_cli.tune.expectation import ADAPTED_NODES, LEVEL, best_length, typical_accuracies
from medusa_cli.tune.plan import EPOCHS, Measured

NAMES = {
    "ar": "plain decoding",
    "lookup": "n-gram drafts",
    "start": "the included drafter",
    "mtp": "the model's own MTP layer",
    "tuned": "the new drafter",
    "tuned-static": "the new drafter with its static tree",
}
# Drafts are useful if a step gives more tokens than this on average.
ACCEPTS = 1.05
# A related model's drafter is trained further if at least this share of its first guesses is right.
RIGHT = 0.2
# Assumed length of a distilled answer, in tokens, over which the time of its prompt is divided.
ANSWER = 128
# Assumed speed of a server whose speed is not known, as a multiple of plain decoding on this machine.
SERVED = 8
# Number of positions on which training is timed.
TIMED = 1_024
OnTick = Callable[[str], None]


def ready_drafters(model: ModelSource) -> dict[str, Choice]:
    """Returns a model's drafters that need no training: an included drafter that fits, and the model's MTP layer."""
    drafters: dict[str, Choice] = {}
    if related := shipped_by_shape(model):
        drafters["start"] = choose(model, None, f"{related[0].path}/", None)
    if mtp_layer.layout_of(model) is not None:
        drafters["mtp"] = choose(model, None, mtp_layer.NAME, None)
    return drafters


def compare(
    model: ModelSource,
    drafts: Mapping[str, Choice],
    questions: list[Question],
    tokens: int,
    options: LoadOptions,
    tick: OnTick,
) -> Document:
    """Returns the bench results of plain decoding, n-gram drafts and the drafters on the questions."""

    @contextmanager
    def watch(backbone: Backbone, turns: int) -> Iterator[Callable[..., None]]:
        yield lambda name, results, new: tick(f"comparing, {NAMES[name]}")

    plain = choose(model, None, None, None, need_drafter=False)
    names = ["ar", "lookup", *drafts]
    bench = Bench(plain, drafts, names, questions, tokens, Sampling(), "held-out prompts", options)
    return bench.run(watch)


def measure(
    model: ModelSource,
    questions: list[Question],
    tokens: int,
    options: LoadOptions,
    recipe_of: Callable[[Run | None], Recipe],
    tick: OnTick,
) -> Measured:
    """Returns the speeds of the methods that need no training, of distilling and of training.

    recipe_of: returns the recipe of a training that starts from a run's drafter (None: from a new
    drafter).
    """
    drafters = ready_drafters(model)
    begun = time.monotonic()
    methods = compare(model, drafters, questions, tokens, options, tick)["methods"]
    compare_s = time.monotonic() - begun
    plain = methods["ar"]
    drafted = {name: row for name, row in methods.items() if name != "ar"}
    lengths = {name: row["acceptance_length"] or 1.0 for name, row in drafted.items()}
    answers = [row["turns"][0] for row in plain["answers"]]
    start = None
    accuracies = typical_accuracies()
    if related := shipped_by_shape(model):
        # If rows are expensive on this machine, the bench may not have drafted, even with a good
        # drafter.
        measured = _accuracies(model, related[0], questions, answers, options)
        if measured[0][0] >= RIGHT:
            start, accuracies = related[0], measured
    times = _step_times(model, options, start)
    gc.collect()
    verify = times.verify

    recipe = recipe_of(start)
    # Seconds per answer token: the token's part of a batch's step and of the prompt's pass.
    answer_s = verify[max(verify)] / max(verify) + (plain["first_token_s"] or 0.0) / ANSWER
    if recipe.distill.endpoint is not None:
        answer_s = 1 / (SERVED * plain["tokens_per_s"])
    # Answers are repeated to about the length of distilled answers. Otherwise, drafters that read
    # prompts would spend too much of their time on the prompts.
    repeats = max(1, ANSWER // tokens)
    longer = [" ".join([answer] * repeats) for answer in answers]
    facts = _time_training(recipe, questions, longer, options, start)
    seconds = facts["seconds"]
    trained_s = seconds["training"] + seconds["validation"]
    if recipe.distill.endpoint is not None:  # servers send no states
        trained_s += seconds["states"] / EPOCHS
    return Measured(
        plain["tokens_per_s"],
        {name: row["speedup"] for name, row in drafted.items()},
        lengths,
        tuple(verify.items()),
        tuple(times.draft.items()),
        accuracies,
        answer_s,
        trained_s / max(1, facts["positions"]),
        tokens,
        compare_s,
        facts["memory_bytes"],
        None if start is None else str(start.path),
        0.0 if start is None else _limit(start),
    )


def plain_step_s(model: ModelSource, options: LoadOptions) -> float:
    """Returns the seconds of a plain step."""
    times = step_times_for(load_backbone(model, options), None, None)
    gc.collect()
    return times.verify[1]


def _step_times(model: ModelSource, options: LoadOptions, start: Run | None) -> StepTimes:
    """Returns the step times with the drafter of `start`, or the expected step times with a new drafter."""
    backbone = load_backbone(model, options)
    if start is not None:
        drafter = load_drafter(start.drafter_dir, backbone)
        return step_times_for(backbone, drafter, stamp_of(start.drafter_dir))
    times = step_times_for(backbone, None, None)
    levels = range(1, len(typical_accuracies()) + 1)
    return replace(times, draft={level: LEVEL * level * times.verify[1] for level in levels})


def _limit(start: Run) -> float:
    """Returns the acceptance length of a drafter on the model for which it was trained."""
    return best_length(read_calibration(start.calibration_path).accuracies, ADAPTED_NODES)


def _accuracies(
    model: ModelSource,
    start: Run,
    questions: Sequence[Question],
    answers: Sequence[str],
    options: LoadOptions,
) -> list[list[float]]:
    """Returns a drafter's accuracies on the model's answers; zero if the answers are too short for the last head."""
    with tempfile.TemporaryDirectory() as folder:
        data = _write(Path(folder), questions, answers)
        try:
            document = calibrate(Run(Path(folder)), model, start.drafter_dir, options, data=data)
        except UserError:
            return [[0.0]]
    accuracies: list[list[float]] = document["accuracies"]
    return accuracies


def _time_training(
    recipe: Recipe,
    questions: Sequence[Question],
    answers: Sequence[str],
    options: LoadOptions,
    start: Run | None,
) -> Document:
    """Returns the estimate of a training on copies of the answers, without writing into a run."""
    copies = 2 + TIMED // max(1, sum(len(answer.split()) for answer in answers))
    with tempfile.TemporaryDirectory() as folder:
        data = _write(Path(folder), questions, answers, copies)
        recipe = replace(recipe, train=replace(recipe.train, epochs=1))
        return estimate(Run(Path(folder)), recipe, options=options, data=data, start=start)


def _write(
    folder: Path, questions: Sequence[Question], answers: Sequence[str], copies: int = 1
) -> Path:
    """Writes questions and their answers as conversations into a folder; returns the file."""
    data = folder / "distill.jsonl"
    with data.open("w", encoding="utf-8") as out:
        for number in range(copies):
            for question, answer in zip(questions, answers, strict=True):
                asked = {"role": "user", "content": question.turns[0]}
                answered = {"role": "assistant", "content": answer.strip() or "Yes, it is."}
                record = {"id": f"{question.id}-{number}", "messages": [asked, answered]}
                out.write(json.dumps(record) + "\n")
    return data
