"""Estimates of the data, memory and time of a training run from one or two steps whose results are discarded."""

import time
from dataclasses import replace
from pathlib import Path

import torch

from medusa_cli.data.conversation import Conversation, check_conversations
from medusa_cli.data.packing import Dataset, positions_of
from medusa_cli.data.states import states_of, tokens_to_run
from medusa_cli.device import peak_memory
from medusa_cli.errors import UsageError
from medusa_cli.files.io import Document
from medusa_cli.model.distributed import Distributed
from medusa_cli.runs.load_options import DEFAULT_LOADING, LoadOptions
from medusa_cli.runs.recipe import Recipe
from medusa_cli.runs.run import Run
from medusa_cli.train import setup
from medusa_cli.train.loop import Trainer
from medusa_cli.train.schedules import lambda_0

SAMPLED = 2  # steps to run; the first step is a warm-up
FORWARD = 1 / 3  # share of a step's time spent in the forward pass


def estimate(
    run: Run,
    recipe: Recipe,
    *,
    options: LoadOptions = DEFAULT_LOADING,
    data: Path | None = None,
    start: Run | None = None,
) -> Document:
    """Estimates the cost of `train` with the same arguments, without writing anything.

    tokens_to_run: the number of tokens whose hidden states are not stored yet. disk_bytes: the size
    of these states. memory_bytes: the peak memory of this process after the sampled steps; training
    has the same peak. seconds: the time for hidden states, training and validations.
    """
    setup.check_recipe(recipe)
    recipe = setup.with_dtype(recipe, options)
    train = recipe.train
    source = data or run.data_path
    if train.shard:
        raise UsageError("@dry_run loads the model in one process", "leave train.shard=true out")
    if train.states == "vllm":
        raise UsageError(
            "@dry_run does not read the states that vLLM wrote",
            "leave it out, or use train.states=kept",
        )
    setup.check_loading(train, options, Distributed())
    check_conversations(source)
    backbone = setup.load_model(recipe, options)
    dataset, drafter, online = setup.read_data(recipe, backbone, source)
    setup.start_heads(run, start, backbone, drafter, train.stage, dataset)
    if not online:
        # If the data set has a states tensor, even an empty one, batch sizes are measured in
        # trained positions instead of tokens.
        dataset = replace(dataset, states=torch.empty(0))
    trainer = Trainer(backbone, drafter, dataset, recipe, run)
    missing = 0
    prefill = 0.0
    if not online:
        missing = tokens_to_run(dataset, run, backbone, source, drafter.taps)
        prefill = missing * _take_states(trainer)
    seconds_a_position = _time_steps(trainer)
    validations = -(-trainer.steps // train.validation_every) if trainer.validation else 0
    held_out = sum(map(positions_of, trainer.validation))
    seconds = {
        "states": prefill,
        "training": trainer.positions * seconds_a_position,
        "validation": validations * held_out * seconds_a_position * FORWARD,
    }
    return {
        "conversations": len(dataset.train),
        "held_out": len(dataset.held_out),
        "answer_tokens": positions_of(dataset.train),
        "positions": trainer.positions,
        "steps": trainer.steps,
        "tokens_to_run": missing,
        "disk_bytes": 2 * missing * backbone.hidden_size * len(drafter.taps),
        "parameters": sum(weight.numel() for weight in trainer.parameters),
        "memory_bytes": peak_memory(backbone.device),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _take_states(trainer: Trainer) -> float:
    """Computes only the hidden states that the first SAMPLED steps need; returns the seconds per token."""
    backbone = trainer.backbone
    taps = trainer.drafter.taps
    rows: list[torch.Tensor] = []
    count = 0
    start = time.perf_counter()

    def with_rows(item: Conversation) -> Conversation:
        nonlocal count
        states = states_of(backbone, item.tokens, taps)[:-1].to("cpu", torch.bfloat16)
        rows.append(states)
        count += len(states)
        return replace(item, state_rows=(count - len(states), len(states)), states_digest=None)

    for number in range(min(SAMPLED, trainer.steps)):
        trainer.groups[number] = [
            [with_rows(item) for item in batch] for batch in trainer.groups[number]
        ]
    seconds = (time.perf_counter() - start) / count
    known: Dataset = trainer.dataset
    trainer.dataset = replace(known, states=torch.cat(rows), columns=None)
    return seconds


def _time_steps(trainer: Trainer) -> float:
    """Runs SAMPLED steps without saving anything; returns the last step's seconds per position.

    In stage 1, these are the first steps of the training. In stage 2, they are the first steps that
    also train the model, because such steps take the most time and memory.
    """
    train = trainer.recipe.train
    if train.stage == 2:
        learning = (
            step
            for step in range(trainer.steps)
            if lambda_0(
                trainer.progress(step),
                schedule=train.schedule,
                peak=train.lambda_0,
                share=train.heads_first,
            )[1]
        )
        trainer.step = next(learning, 0)
    step = trainer.train_step()
    for _ in range(1, min(SAMPLED, trainer.steps - trainer.step + 1)):
        step = trainer.train_step()
    return step.seconds / max(1, step.positions)
