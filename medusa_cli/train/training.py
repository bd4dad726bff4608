"""`train`, which implements `medusa train`, and `evaluate`, which measures a trained run on other conversations."""

import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_cli.data.conversation import Conversation, check_conversations
from medusa_cli.data.draft_vocabulary import coverage
from medusa_cli.data.packing import Dataset, read_dataset
from medusa_cli.data.states import with_hidden_states
from medusa_cli.data.vllm_states import with_vllm_states
from medusa_cli.device import keep_freed_memory
from medusa_cli.drafters import DRAFTERS, Eagle
from medusa_cli.drafters.firp import check_extra_rows
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.io import save_drafter
from medusa_cli.errors import UserError
from medusa_cli.files import process
from medusa_cli.files.hub import hub_left_as_it_was
from medusa_cli.files.io import (
    Document,
    read_jsonl,
    replacing,
    replacing_folder,
    write_atomic,
    write_json,
)
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.quiet import without_progress_bars
from medusa_cli.model import Backbone
from medusa_cli.model import lora as adapter
from medusa_cli.model.backbone import identity_of
from medusa_cli.model.digest import weights_of
from medusa_cli.model.distributed import Distributed
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.recipe_files import load_recipe
from medusa_cli.runs.run import Run, provenance, rounding_in, sole_writer
from medusa_cli.train import setup
from medusa_cli.train.checkpoint import check_present, checkpoint_path, set_aside
from medusa_cli.train.log import (
    NAME,
    Stepped,
    TrainLog,
    Validated,
    acceptance_of,
    best_of,
    draw_curves,
    read_log,
    shares,
)
from medusa_cli.train.loggers import OnEvent, logger_of
from medusa_cli.train.loop import Trainer

log = logging.getLogger(__name__)
LEVELLED = 4096  # positions used to measure the scale of EAGLE's taps
GOOD_COVERAGE = 0.95  # of held-out tokens; a token outside the draft vocabulary ends a draft path
FAR = 0.05  # KL to the original in nats per token above which stage 2 warns
# Training figures that are stored with the drafter.
KEPT_FIGURES = ("steps", "best_step", "positions", "draft_coverage", "validation")


@dataclass(frozen=True)
class Trained:
    """Holds the result of a training run: the run with the drafter, the figures, and whether it was stopped early."""

    run: Run
    figures: Document
    stopped: bool = False


@hub_left_as_it_was()
def train(
    run: Run,
    recipe: Recipe,
    *,
    options: LoadOptions = DEFAULT_LOADING,
    data: Path | None = None,
    start: Run | None = None,
    resume: bool = False,
    logger: str | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    seconds_left: Callable[[], float] | None = None,
    show: ShowProgress = show_nothing,
) -> Trained | None:
    """Trains the recipe's drafter in a run and saves it there.

    The saved drafter is that of the validation with the highest simulated acceptance length, or of the last step if
    there is no validation. data: conversations to use instead of the run's. start: a run whose heads (in stage 2 with
    their adapter) are trained further. logger: tensorboard, wandb or trackio; it also receives the events. should_stop:
    called before every step; training stops if it returns True, and leaves a checkpoint for `resume`. seconds_left:
    returns the time that is left; training ends within it, if necessary with fewer steps. show: called with a name, the
    number of tokens done, the total and a `note`. Under torchrun, the processes share every step, and all but the first
    return None.
    """
    setup.check_recipe(recipe)
    if process.owned:
        keep_freed_memory()
    world = Distributed.join(options.device, sharded=recipe.train.shard)
    options = replace(options, device=world.device(options.device))
    setup.check_loading(recipe.train, options, world)
    recipe = setup.with_dtype(recipe, options)
    source = data or run.data_path
    check_conversations(source)
    if resume:
        check_present(checkpoint_path(run))

    run.path.mkdir(parents=True, exist_ok=True)
    with sole_writer(run.path, "medusa train") if world.first else nullcontext():
        run.keep_template(recipe.chat_template)
        backbone, dataset, drafter = _load(run, recipe, options, source, world, show)
        if not resume:
            setup.start_heads(run, start, backbone, drafter, recipe.train.stage, dataset)
        trainer = Trainer(
            backbone,
            drafter,
            dataset,
            recipe,
            run,
            resume=resume,
            should_stop=should_stop,
            seconds_left=seconds_left,
            world=world,
        )

        if world.first:
            if not resume:
                set_aside(run)
            write_atomic(run.recipe_path, recipe.to_yaml())
            _describe(trainer)
            with logger_of(logger, run, recipe, trainer.step or None) as on_event:
                _run(trainer, show, on_event)
        else:
            for _ in trainer.events():
                pass

        world.wait()
        world.destroy()
        if not world.first:
            return None

        figures = _figures(trainer)
        if trainer.step < trainer.steps:
            return Trained(run, figures, stopped=True)
        trainer.take_best()
        return Trained(_save(trainer, source, figures), figures)


def _load(
    run: Run,
    recipe: Recipe,
    options: LoadOptions,
    source: Path,
    world: Distributed,
    show: ShowProgress,
) -> tuple[Backbone, Dataset, HeadDrafter]:
    """Returns the backbone, data set and a new drafter; the first process downloads files that all processes read."""
    train = recipe.train
    with nullcontext() if train.shard else world.main_process_first():
        backbone = setup.load_model(recipe, options)
    log.info(backbone.description)
    with world.main_process_first():
        run.bind(backbone.identity)

    dataset, drafter, online = setup.read_data(recipe, backbone, source)
    # Stage 2 is not checked, because its dropout makes any two passes differ.
    if drafter.uses_verify_pass and train.stage == 1 and not train.shard:
        check_extra_rows(backbone)

    if train.states == "vllm":
        dataset = with_vllm_states(dataset, run, backbone, drafter.taps, world)
    elif not online:
        dataset = with_hidden_states(
            dataset, run, backbone, source, drafter.taps, world=world, show=show
        )
    if isinstance(drafter, Eagle):
        first = dataset.batch(backbone, drafter, dataset.micro_batches(dataset.train, LEVELLED)[0])
        drafter.level(first.hidden[first.learned])
    return backbone, dataset, drafter


def _describe(trainer: Trainer) -> None:
    """Logs the size of the training run, and warns of short answers and of processes that have nothing to do."""
    dataset = trainer.dataset
    train = trainer.recipe.train
    size = trainer.world.size

    log.info(
        f"{dataset.report}; {len(dataset.train):,} conversations to train on, {len(dataset.held_out):,} held out; "
        f"{trainer.positions:,} tokens in {trainer.steps:,} steps"
    )
    _warn_of_short_answers("training", dataset.train, trainer.drafter.num_heads)
    held_out = [item for batch in trainer.validation for item in batch]
    _warn_of_short_answers("held-out", held_out, trainer.drafter.num_heads)
    known = len(trainer.drafter.draft_ids)
    vocabulary = trainer.backbone.vocab_size
    covered = _held_out_coverage(trainer)
    if known < vocabulary and covered is not None:
        log.info(
            f"the draft vocabulary has {known:,} of {vocabulary:,} tokens, {covered:.1%} of those in held-out answers"
            + ("; a larger drafter.draft_vocab_size covers more" if covered < GOOD_COVERAGE else "")
        )
    if size > train.accumulation:
        log.warning(
            f"{size - train.accumulation} of {size} processes have nothing to do: a step has "
            f"train.accumulation={train.accumulation} micro-batches; train.accumulation={train.accumulation * size} "
            f"with train.batch_tokens={max(2, train.batch_tokens // size)} gives all a part of the same steps"
        )


def _run(trainer: Trainer, show: ShowProgress, on_event: OnEvent) -> None:
    """Runs the steps, logs the events, shows progress and draws the curves."""
    run = trainer.run
    total = trainer.positions
    acceptance = ""
    show("training", trainer.positions_done, total)
    with closing(TrainLog(run.path / NAME, trainer.step or None)) as lines:
        for event in trainer.events():
            lines.write(event)
            on_event(event)
            if isinstance(event, Stepped):
                note = f"loss {event.loss:.3f}, top-1 {shares(event.accuracies)}, lr {event.lr:.1e}"
                note += f"{acceptance}, {event.memory / 1e9:.1f} GB"
                show("training", event.total_positions, total, note=note)
            elif isinstance(event, Validated):
                acceptance = f", {event.acceptance:.2f} tokens per step"
                _report(event)
            else:
                draw_curves(
                    read_log(lines.path),
                    run.path / "train.png",
                    f"{run.name}: stage {trainer.recipe.train.stage}",
                )


def _warn_of_short_answers(name: str, items: Sequence[Conversation], heads: int) -> None:
    """Warns of heads that have no target: head k needs an answer of more than k tokens."""
    longest = max((end - start for item in items for start, end in item.spans), default=heads + 1)
    if longest > heads:
        return
    unseen = f"head {heads} has" if longest == heads else f"heads {longest} to {heads} have"
    log.warning(
        f"{unseen} no position in the {name} data: its longest answer has {longest} tokens; distill longer answers, "
        f"or train with drafter.num_heads={max(1, longest - 1)}"
    )


def _report(event: Validated) -> None:
    """Logs a validation; in stage 2 also how far the model has changed, with a warning if this is too far."""
    text = f"step {event.step}: held-out loss {event.loss:.3f}, top-1 by head {shares(event.accuracies)}, "
    text += f"simulated {event.acceptance:.2f} tokens per step"
    parts = event.parts
    if "kl" in parts:
        perplexity = math.exp(parts["nll"])
        original = math.exp(parts["nll_original"])
        text += f"; KL to the original {parts['kl']:.4f} nats, perplexity {perplexity:.3f} (original {original:.3f}), "
        text += f"greedy agreement {parts['agreement']:.1%}"
    elif "nll" in parts:
        text += f"; perplexity {math.exp(parts['nll']):.3f}"
    log.info(text)
    if parts.get("kl", 0.0) > FAR:
        log.warning(
            f"the model moves away from the original (KL over {FAR} nats): lower train.lambda_0 or the rates"
        )


def _figures(trainer: Trainer) -> Document:
    """Returns the training figures for the result and for the drafter's provenance."""
    lines = read_log(trainer.run.path / NAME)
    steps = [line for line in lines if line["event"] == "stepped"]
    checks = [line for line in lines if line["event"] == "validated"]
    keys = ("loss", "head_losses", "accuracies", "positions", "parts")
    seconds = sum(line["seconds"] for line in steps)
    best = best_of(checks)
    first = next((line for line in checks if line["step"] == 0), None)
    return {
        "heads": trainer.drafter.num_heads,
        "steps": trainer.steps,
        "positions": trainer.positions,
        # The draft vocabulary may come from another data set.
        "draft_coverage": coverage(trainer.drafter.draft_ids, trainer.dataset.answers()),
        "held_out_coverage": _held_out_coverage(trainer),
        "validation": best and {key: best[key] for key in keys},
        "best_step": best and best["step"],
        "expected_acceptance": best and acceptance_of(best["accuracies"]),
        "expected_acceptance_at_start": first and acceptance_of(first["accuracies"]),
        "loss": steps[-1]["loss"] if steps else None,
        "tokens_per_s": round(sum(line["positions"] for line in steps) / seconds, 1)
        if seconds
        else 0.0,
    }


def _held_out_coverage(trainer: Trainer) -> float | None:
    """Returns the share of held-out answer tokens that the heads can guess; None if there are no such answers."""
    answers = trainer.dataset.answers(trainer.dataset.held_out)
    return coverage(trainer.drafter.draft_ids, answers) if answers else None


def _save(trainer: Trainer, source: Path, figures: Document) -> Run:
    """Saves the drafter (and the adapter or tuned model) with its provenance; returns the run that holds them."""
    run = trainer.run
    backbone = trainer.backbone
    train = trainer.recipe.train
    identity = dict(backbone.identity)
    tuned = train.stage == 2 and train.tuning == "full"
    if tuned:
        run, identity = _tuned_run(backbone, run)
    elif train.stage == 2:
        adapter.save(backbone.model, run.adapter_dir, identity["id"])
        identity["adapter"] = adapter.digest(run.adapter_dir)
    elif run.adapter is not None:  # the adapter belonged to the drafter that is being replaced
        shutil.rmtree(run.adapter_dir)

    dataset = trainer.dataset
    written = provenance(
        identity,
        data={"path": str(source), "digest": dataset.digest, "conversations": dataset.report.read},
        recipe=trainer.recipe.to_dict(),
        **{key: figures[key] for key in KEPT_FIGURES},
    )
    with replacing_folder(run.drafter_dir) as part:
        save_drafter(trainer.drafter, part, written, train.save_dtype == "int8")
    if tuned:
        _copy_conversations(source, run)
    return run


def _copy_conversations(source: Path, run: Run) -> None:
    """Copies conversations into a tuned model's run, without their states, which the original model computed."""
    with replacing(run.distill_path) as part, part.open("w", encoding="utf-8") as out:
        for record in read_jsonl(source, array=True):
            if isinstance(record, dict):
                record.pop("state_rows", None)
                record.pop("states_digest", None)
                out.write(json.dumps(record) + "\n")


@without_progress_bars()
def _tuned_run(backbone: Backbone, run: Run) -> tuple[Run, dict[str, Any]]:
    """Saves a fully tuned model in a separate run, RUN/tuned; returns that run and the model's identity.

    The run is separate because the tuned model is a different model.
    """
    tuned = Run.open(str(run.path / "tuned") + "/", create=True)
    folder = tuned.path / "model"
    backbone.take_own_attention()
    # Training needs fp32. The model is saved in the number type of its config, in which it was loaded.
    backbone.model.to(backbone.model.config.dtype)
    with replacing_folder(folder) as part:
        backbone.model.save_pretrained(part)
        backbone.tokenizer.save_pretrained(part)
    identity = identity_of(
        backbone.model.config,
        backbone.vocab_size,
        id=str(folder),
        weights=weights_of(ModelSource.of(str(folder))),
        adapter=None,
    )
    write_json(tuned.path / "run.json", provenance(identity))
    log.info(f"the tuned model is in {folder}, its run is {tuned.path}")
    return tuned, identity


def evaluate(
    run: Run, data: Path, options: LoadOptions, max_samples: int | None = None
) -> Validated:
    """Measures a run's heads, and its adapter if it has one, on the first `max_samples` conversations of a file.

    A stage 1 run is measured like a stage 2 run whose adapter has no effect, except for FIRP, which
    needs a frozen model. Raises UserError if the heads cannot be read, or if the model was fully
    tuned and so has no original to compare with.
    """
    recipe = setup.with_dtype(load_recipe(run.recipe_path), options)
    train = recipe.train
    joint = recipe.train.stage == 2
    if joint and train.tuning == "full":
        raise UserError(
            f"{run.path} was trained in full, and keeps no original to compare with", "leave it out"
        )

    frozen = DRAFTERS[recipe.drafter.name].uses_verify_pass
    dtype = train.dtype if options.dtype == "auto" else options.dtype
    changed: dict[str, Any] = {
        "stage": 1 if frozen else 2,
        "tuning": train.tuning if joint else "lora",
    }
    changed |= {"objective": "kl", "dtype": dtype, "shard": False}
    # Conversations are truncated and batched alike for every run, and every conversation is
    # measured.
    changed |= {"max_length": 1024, "batch_tokens": 2048, "validation_tokens": 10_000_000}
    recipe = replace(recipe, train=replace(train, **changed))
    options = replace(options, dtype=dtype, engine="eager", quantize=rounding_in(run.drafter_dir))

    check_conversations(data)
    backbone = setup.load_model(recipe, options)
    dataset = read_dataset(data, backbone, 0.0, setup.longest(recipe.train))
    kept = dataset.train[:max_samples]
    # Nothing is trained, but a Trainer requires training data.
    dataset = replace(dataset, train=kept, held_out=kept)
    drafter = setup.build_drafter(backbone, recipe.drafter, dataset)
    if not setup.copy_heads(run, backbone, drafter, adapted=joint):
        raise UserError(
            f"{run.drafter_dir} holds no heads as {run.recipe_path} describes them",
            "train them again",
        )
    return Trainer(backbone, drafter, dataset, recipe, run).validate()
