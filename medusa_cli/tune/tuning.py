"""Runs the parts of a tuning in a given time. Each part does what a command does, and can be resumed after a kill."""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medusa_cli.bench.bench import save
from medusa_cli.bench.questions import Question
from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import positions_of
from medusa_cli.decode.step_times import step_times_for
from medusa_cli.distill.distillation import distill, read_distilled
from medusa_cli.drafters import load_drafter
from medusa_cli.drafters.eagle import default_taps
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.files.io import Document, read_as, read_object, write_json
from medusa_cli.files.model_source import ModelSource, lasting_name
from medusa_cli.model.distributed import Distributed
from medusa_cli.model.load import resolve_device
from medusa_cli.progress import span
from medusa_cli.runs.load_options import LoadOptions, as_trained
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.recipe_files import recipe_of
from medusa_cli.runs.resolve import choose, read_calibration
from medusa_cli.runs.run import (
    RUNS,
    STAMP,
    Run,
    called,
    describe_drafter,
    provenance,
    sole_writer,
    stamp_of,
)
from medusa_cli.train import calibrate, train
from medusa_cli.train.checkpoint import checkpoint_path
from medusa_cli.train.log import NAME, acceptance_of, read_log
from medusa_cli.tree.io import save_tree
from medusa_cli.tree.search import TimedTree, budgets
from medusa_cli.tune.expectation import interval
from medusa_cli.tune.measuring import (
    ACCEPTS,
    NAMES,
    compare,
    measure,
    plain_step_s,
    ready_drafters,
)
from medusa_cli.tune.plan import EPOCHS, MAX_EPOCHS, WORTH, Measured, Plan, expected_speedup, plan
from medusa_cli.tune.prompts import HELD_OUT, QUESTIONS, held_out_questions, read_prompts

STATE = "tune.json"
SAY_S = 60.0
SAVE_S = 5.0
# Number of positions per training step, on a CPU and on a GPU, as in the training of the included
# drafters.
BATCH = 512
GPU_BATCH = 6_144
ADAPT_LR = 2e-4
# A new drafter uses rows of the lm_head, which are not trained. This suits small batches and few answers (docs/log.md,
# "Training").
NEW_DRAFTER = ("drafter.matrices=none", "drafter.draft_vocab_size=16384", "train.lr=1e-3")
NEW_HYDRA = ("drafter.prefix_layers=1", "train.regress=5")
VALIDATIONS = 16
# Ratio of the planned positions to those that fit in the time. It is above 1, because training may
# be faster than in the first measurement.
SPARE = 2
# The minimum amounts of data, which are used even if the time is too short for them.
MIN_TOKENS = 256
MIN_POSITIONS = 2_048
MAX_NEW_TOKENS = 256
CONTEXT = 1_024
# The share of the time for the answers of the first comparison, its number of methods, and the minimum and the maximum
# length of an answer, in tokens. In short answers, prompts take a larger share of the time than in use.
COMPARISON = 0.05
COMPARED = 3
MIN_ANSWER = 16
MAX_ANSWER = 128
# A longer tuning is measured again if its answers are more than this many times as long.
LONGER = 1.1
# Number of held-out conversations for the calibration.
CALIBRATED = 200
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """Holds the request for a tuning, the seconds that it used, and the result of each part that has ended.

    promised: the speedup that the plan expected. drafter: the drafter as in `Plan`. distilled: the number of answer
    tokens. words: the recipe's settings, once training has begun. tree_nodes: the size of the saved tree, or 0 if there
    is no tree. after: the results of the last comparison. chosen: the fastest method.
    """

    model: str
    data: str | None
    time_s: float
    used_s: float = 0.0
    measured: Measured | None = None
    promised: float | None = None
    drafter: str = "hydra"
    distilled: int | None = None
    words: list[str] | None = None
    trained: Document | None = None
    tree_nodes: int | None = None
    after: Document | None = None
    chosen: str | None = None


class Tuning:
    """Tunes a model in a run within `time_s` seconds; with `dry`, only measures and plans, and writes nothing.

    An interrupted run is continued. If `time_s` is longer than before, more data is distilled and
    training begins again.
    """

    def __init__(
        self,
        run: Run,
        model: ModelSource,
        options: LoadOptions,
        time_s: float,
        data: Path | None = None,
        endpoint: str | None = None,
        dry: bool = False,
    ) -> None:
        self.run = run
        self.model = model
        self.options = options
        self.data = data
        self.endpoint = endpoint
        self.dry = dry
        path = None if data is None else str(data.absolute())
        self.state = State(lasting_name(model.name), path, time_s)
        if (run.path / STATE).is_file():
            self._continue(run.path / STATE)
        self.time_s = self.state.time_s
        self._began = self._said = time.monotonic()
        self._saved = 0.0
        if self._start is not None:
            self.options = as_trained(options, self._start.drafter_dir)

    def _continue(self, path: Path) -> None:
        """Takes over an earlier state; raises UserError if it belongs to another model or other data."""
        new = self.state
        old = read_as(path, State, "the tuning's state", "delete it to begin again")
        for name in ("model", "data"):
            if getattr(old, name) != getattr(new, name):
                before, now = getattr(old, name), getattr(new, name)
                raise UserError(
                    f"the run {path.parent} was tuned with the {name} {before}, not {now}",
                    "repeat the earlier command, or choose another @run",
                )
        if new.time_s <= old.time_s:
            self.state = old
            return
        measured = old.measured
        if measured is not None:
            tokens = answer_tokens(new.time_s, measured.plain_s)
            # Prompts take a smaller share of the time of longer answers, so the expectation would be too low.
            measured = None if tokens > LONGER * measured.answer_tokens else measured
        self.state = replace(new, used_s=old.used_s, measured=measured)

    @property
    def used_s(self) -> float:
        """Returns the seconds that this and earlier processes took."""
        return self.state.used_s + time.monotonic() - self._began

    @property
    def measured(self) -> Measured:
        assert self.state.measured is not None
        return self.state.measured

    def work(self) -> None:
        """Runs the parts that are not complete yet."""
        if self.state.after is not None:
            return
        seeds, source = read_prompts(self.model, self.data)
        questions = held_out_questions(seeds)
        try:
            if self.state.measured is None:
                self._measure(questions)
            if not self._is_worth_it(seeds) or self.dry:
                return
            if self.state.distilled is None:
                self._distill(seeds, source)
            if self.state.trained is None:
                self._train()
            if self.state.tree_nodes is None:
                self._calibrate()
            self._choose(questions)
        finally:
            self._note()

    def _note(self, **changes: Any) -> None:
        """Changes the state, and saves it with the seconds used so far."""
        self.state = replace(self.state, used_s=self.used_s, **changes)
        self._began = self._saved = time.monotonic()
        if not self.dry:
            self.run.path.mkdir(parents=True, exist_ok=True)
            write_json(self.run.path / STATE, asdict(self.state))

    def _tick(self, part: str, expected: Callable[[], float | None] = lambda: None) -> None:
        """Every few seconds, saves how much time was used; every minute, prints the progress."""
        now = time.monotonic()
        if now - self._saved > SAVE_S:
            self._note()
        if now - self._said > SAY_S:
            self._said = now
            figure = expected()
            gain = "" if figure is None else f"; expect {interval(figure)}"
            log.info(f"{span(self.used_s)} of {span(self.time_s)}: {part}{gain}")

    # Measuring and planning

    @property
    def _start(self) -> Run | None:
        """Returns the included drafter that is trained further, if any."""
        start = self.state.measured.start if self.state.measured else None
        return None if start is None else Run(Path(start))

    def _measure(self, questions: list[Question]) -> None:
        drafter = ready_drafters(self.model).get("start")
        if drafter is not None:
            self.options = as_trained(self.options, drafter.drafter)
        tokens = answer_tokens(self.time_s, plain_step_s(self.model, self.options))

        def recipe(start: Run | None) -> Recipe:
            return self._recipe(self._words("hydra", start), start)

        measured = measure(self.model, questions, tokens, self.options, recipe, self._tick)
        self._note(measured=measured)

    def _is_worth_it(self, seeds: Sequence[Conversation]) -> bool:
        """Prints the plan and the expected speed; returns False if a method that needs no training is as fast."""
        measured = self.measured
        best = max(measured.speedups, key=lambda name: measured.speedups[name])
        planned = plan(self.time_s, self.used_s, measured, positions_of(seeds))
        self.time_s = min(self.time_s, planned.time_s)
        if self.state.promised is None:
            self._say(planned)
            self._note(promised=planned.expected, drafter=planned.drafter)
        # If no drafts are accepted, a difference in speed is noise.
        is_real = measured.lengths[best] > ACCEPTS
        if not is_real or measured.speedups[best] < (self.state.promised or 1.0):
            return True
        log.info(
            f"no training is needed: with {NAMES[best]}, decoding is {measured.speedups[best]:.2f} x as fast, and "
            f"training in this time is expected to give {planned.expected:.2f} x"
        )
        self._note(chosen=best)
        return False

    def _say(self, planned: Plan) -> None:
        """Prints the measured figures and the plan."""
        measured = self.measured
        log.info(f"plain decoding: {measured.plain_per_s:,.1f} tokens/s here; without training:")
        for name, speedup in measured.speedups.items():
            log.info(
                f"  {NAMES[name]}: {speedup:.2f} x, {measured.lengths[name]:.2f} tokens per step"
            )
        log.info(
            f"distilling: about {1 / measured.answer_s:,.0f} answer tokens/s; training: "
            f"{1 / measured.position_s:,.0f} positions/s, {measured.memory / 1e9:.1f} GB of memory"
        )
        if not planned.positions:
            log.warning(
                f"@time {span(self.time_s)} is too short for this model, as comparing takes {span(measured.end_s)}: "
                "the smallest amount of data is used"
            )
        drafter = planned.drafter
        if self._start is not None:
            drafter = f"{NAMES['start']} ({self._start.name})"
        log.info(
            f"plan for {span(self.time_s)}: about {planned.tokens:,} answer tokens in {span(planned.distill_s)}, "
            f"{drafter} on {planned.positions:,} positions in "
            f"{span(planned.train_s)}, then the choice by measured speed; expect {interval(planned.expected)}"
        )
        log.info(self.outlook(planned.expected))

    def outlook(self, expected: float) -> str:
        """Returns a text about the expected speed with three times as much time."""
        more = plan(3 * self.state.time_s, 0.0, self.measured).expected
        if more <= expected * 1.01:
            return "more time would bring less than 1 % more"
        return f"{span(3 * self.state.time_s)} would bring {interval(more)}"

    # Distilling, training, calibrating and choosing

    @property
    def _on_gpu(self) -> bool:
        return resolve_device(self.options.device).startswith("cuda")

    def _words(self, drafter: str, start: Run | None) -> list[str]:
        """Returns the settings of the recipe that do not depend on the amount of data."""
        words = [f"train.validation_fraction={HELD_OUT}", "train.validation_tokens=4096"]
        if self._on_gpu:
            words += ["train.states=fresh", f"train.batch_tokens={GPU_BATCH}"]
        else:
            words += [f"train.batch_tokens={BATCH}"]
        if start is not None:
            return [*words, f"train.lr={ADAPT_LR}"]
        return [drafter, *NEW_DRAFTER, *(NEW_HYDRA if drafter == "hydra" else ()), *words]

    def _recipe(self, words: Sequence[str], start: Run | None) -> Recipe:
        flags = {"model": self.model.name, "distill.endpoint": self.endpoint}
        return recipe_of(self.run, words, flags, False, start)

    def _left_s(self) -> float:
        """Returns the seconds until the calibration must begin."""
        return self.time_s - self.measured.end_s - self.used_s

    def _distill(self, seeds: Sequence[Conversation], source: str) -> None:
        """Distills until the rest of the time is needed to train on the answers."""
        measured = self.measured
        drafter = self.state.drafter
        words = [
            *self._words(drafter, self._start),
            f"distill.seed={source}",
            f"distill.context={CONTEXT}",
            f"distill.max_new_tokens={MAX_NEW_TOKENS}",
            "distill.drop_refusals=true",
        ]
        if self.endpoint is None and not self._on_gpu:
            words.append(f"distill.taps={list(self._taps(drafter))}")
        self.run = Run.planned(f"{self.run.path}/")
        kept = positions_of(list(read_distilled(self.run)))
        tokens = kept
        drain_s = MAX_NEW_TOKENS * measured.plain_s

        def training_s() -> float:
            return EPOCHS * tokens * measured.position_s

        def should_stop() -> bool:
            return tokens >= MIN_TOKENS and self._left_s() - drain_s <= training_s()

        def show(
            name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
        ) -> None:
            nonlocal tokens
            tokens = kept + done
            self._tick(f"distilling, {tokens:,} answer tokens", expected)

        def expected() -> float:
            more = max(self._left_s() - training_s(), 0.0) / (
                measured.answer_s + EPOCHS * measured.position_s
            )
            return expected_speedup(drafter, EPOCHS * (tokens + more), measured)

        recipe = self._recipe(words, self._start)
        with sole_writer(self.run.path, "medusa tune"):
            summary = distill(
                self.run, seeds, recipe, self.options, Distributed(), show, should_stop
            )
        assert summary is not None
        if not summary["answer_tokens"]:
            raise UserError(
                f"{self.run.distill_path} holds no answer: each was skipped, refused or failed",
                "give other prompts as @data",
            )
        gc.collect()
        self._note(distilled=summary["answer_tokens"])

    def _taps(self, drafter: str) -> tuple[int, ...]:
        """Returns the layers whose states the drafter reads in addition to the last layer's."""
        if self._start is not None:
            return tuple(read_object(self._start.drafter_dir / "config.json").get("taps") or ())
        depth = self.model.text_fields["num_hidden_layers"]
        return default_taps(depth) if drafter == "eagle" else ()

    def _train(self) -> None:
        """Trains until calibration must begin; an interrupted training is resumed."""
        resume = self.state.words is not None and checkpoint_path(self.run).is_file()
        if self.state.words is None:
            # The checkpoint belongs to an earlier, shorter tuning.
            checkpoint_path(self.run).unlink(missing_ok=True)
            self._note(words=self._training_words())
        assert self.state.words is not None
        begun = time.monotonic()
        end = math.inf

        def seconds_left() -> float:
            nonlocal end
            now = time.monotonic()
            # After convergence, training gets a tenth more time, in which the learning rate falls.
            if end == math.inf and has_converged(self.run):
                end = now + 0.1 * (now - begun)
            return min(self._left_s(), end - now)

        def show(
            name: str, done: int, total: int | None, unit: str = "tokens", note: str = ""
        ) -> None:
            figures = f", {note.partition(', lr')[0]}" if note else ""
            part = f"{name}, {done:,} of {total or 0:,} {unit}{figures}"
            self._tick(part, lambda: self.state.promised)

        trained = train(
            self.run,
            self._recipe(self.state.words, self._start),
            options=self.options,
            start=self._start,
            resume=resume,
            seconds_left=seconds_left,
            show=show,
        )
        assert trained is not None
        gc.collect()
        self._note(trained=trained.figures)

    def _training_words(self) -> list[str]:
        """Returns the settings of a training that ends early when the time is over."""
        measured = self.measured
        tokens = self.state.distilled or MIN_TOKENS
        possible = round(SPARE * self._left_s() / measured.position_s)
        positions = max(MIN_POSITIONS, min(possible, MAX_EPOCHS * tokens))
        batch = GPU_BATCH if self._on_gpu else BATCH
        steps = max(2, positions // batch)
        a_minute = max(1, round(SAY_S / (batch * measured.position_s)))
        return [
            *self._words(self.state.drafter, self._start),
            f"train.max_tokens={positions}",
            f"train.epochs={1 + 2 * positions // tokens}",
            f"train.validation_every={max(1, steps // VALIDATIONS)}",
            f"train.checkpoint_every={min(a_minute, steps // 2)}",
        ]

    def _calibrate(self) -> None:
        """Calibrates the drafter, and saves the tree of the best size on this machine."""
        run = self.run
        nodes = 0
        with sole_writer(run.path, "medusa tune"):
            try:
                document = calibrate(
                    run, self.model, run.drafter_dir, self.options, max_samples=CALIBRATED
                )
                write_json(run.calibration_path, document)
            except UserError as reason:  # the answers are too short for the last head
                log.warning(reason.text)
                run.calibration_path.unlink(missing_ok=True)
                run.tree_path.unlink(missing_ok=True)
            else:
                best = self._best_tree()
                nodes = best.tree.size
                facts = {
                    "calibration": str(run.calibration_path),
                    "expected_acceptance_length": best.expected,
                    "budget": "auto",
                    STAMP: stamp_of(run.drafter_dir),
                }
                identity = describe_drafter(run.drafter_dir).provenance.identity
                save_tree(run.tree_path, best.tree, provenance(identity, **facts))
        gc.collect()
        self._note(tree_nodes=nodes)

    def _best_tree(self) -> TimedTree:
        """Returns the tree with the most expected tokens per second."""
        folder = self.run.drafter_dir
        backbone = load_backbone(self.model, self.options)
        times = step_times_for(backbone, load_drafter(folder, backbone), stamp_of(folder))
        accuracies = read_calibration(self.run.calibration_path).accuracies
        return max(budgets(accuracies, times), key=lambda size: size.tokens_per_s)

    def _choose(self, questions: list[Question]) -> None:
        """Measures the drafter with its trees, and the methods that need no training; chooses the fastest method."""
        own = f"{self.run.path}/"
        drafts = {"tuned": choose(self.model, own, None, None)}
        if (self.state.tree_nodes or 0) > 1:
            drafts["tuned-static"] = choose(self.model, own, None, "static")
        drafts |= ready_drafters(self.model)
        tokens = self.measured.answer_tokens
        document = compare(self.model, drafts, questions, tokens, self.options, self._tick)
        save(document, self.run.bench_dir)
        methods = document["methods"]
        drafted = [
            name for name in methods if (methods[name]["acceptance_length"] or 1.0) > ACCEPTS
        ]
        chosen = max(["ar", *drafted], key=lambda name: methods[name]["speedup"])
        self._note(after=document, chosen=chosen)


def answer_tokens(time_s: float, plain_s: float) -> int:
    """Returns the maximum length of an answer in a comparison, in tokens.

    time_s: the seconds of the tuning. plain_s: the seconds of a plain step. The first comparison takes about the share
    COMPARISON of the time.
    """
    tokens = round(COMPARISON * time_s / (QUESTIONS * COMPARED * plain_s))
    return max(MIN_ANSWER, min(MAX_ANSWER, tokens))


def has_converged(run: Run) -> bool:
    """Returns True if the last third of the validations brought less than 1 % more tokens per step and 1 % less loss.

    One validation is noisy, so neither figure alone shows that training can end.
    """
    lengths: list[float] = []
    losses: list[float] = []
    with suppress(OSError):
        for line in read_log(run.path / NAME):
            if line["event"] == "validated":
                lengths.append(acceptance_of(line["accuracies"]))
                losses.append(line["loss"])
    third = len(lengths) // 3
    if third < 2:
        return False
    is_longer = max(lengths[-third:]) >= (1 + WORTH) * max(lengths[:-third])
    is_lower = min(losses[-third:]) <= (1 - WORTH) * min(losses[:-third])
    return not is_longer and not is_lower


def default_run(model: str) -> Run:
    """Returns the default run of a tuning. It is not named like the model, whose name stands for a shipped drafter."""
    name = called(model.partition(":")[0]).removesuffix(".gguf")
    return Run(RUNS / f"{name}-tuned")
