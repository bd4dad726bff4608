"""How the C library hands out memory: training on a CPU takes and frees gigabytes in every step."""

import ctypes
import hashlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_cli.data.packing import Dataset
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.engine import load_backbone
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.load import peak_memory
from medusa_cli.runs.io import read_json
from medusa_cli.runs.recipe import Recipe, load_recipe
from medusa_cli.runs.resolve import LoadOptions
from medusa_cli.runs.run import Run, rounding_in
from medusa_cli.train import checkpoint as checkpoints
from medusa_cli.train.distributed import Distributed
from medusa_cli.train.events import Averages, Event, Saved, Stepped, Stopped, Validated
from medusa_cli.train.losses import BatchLoss
from medusa_cli.train.optim import optimizer_of
from medusa_cli.train.schedule import learning_rate, turn_of
from medusa_cli.train.setup import build_drafter, drafter_class, joint_backbone, trained_heads, whole_conversations
from medusa_cli.train.stage1 import Stage1Cached, Stage1Online, Task
from medusa_cli.train.stage2 import Stage2

# From glibc's malloc.h. Its own limits are 32 MB for the first and an int for the second.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Use freed memory again in place of giving it back and having every page zeroed anew; False without glibc.

    It made training Medusa heads 18 % faster on two cores.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 25) and mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


# All runs are measured alike, however their own trainings cut and gathered conversations.
MAX_LENGTH, BATCH_TOKENS = 1024, 2048


def evaluate(run: Run, data: Path, options: LoadOptions, max_samples: int | None = None) -> Validated:
    """A run's heads, and its adapter where it has one, on the first conversations of a file.

    A run of stage 1 is one whose adapter does nothing: its KL is measured like that of the others, but for heads whose
    rows ride in a frozen model, which have none. UserError where the heads cannot be read, and for a model trained in
    full, which keeps no original to be held against.
    """
    recipe = load_recipe(run.recipe_path)
    train = recipe.train
    joint = train.stage == 2
    if joint and train.tuning == "full":
        raise UserError(f"{run.path} was trained in full, and keeps no original to compare with", "leave it out")
    tuning = train.tuning if joint else "lora"
    train = replace(train, max_length=MAX_LENGTH, batch_tokens=BATCH_TOKENS, accumulation=1, shard=False)
    dtype = train.dtype if options.dtype == "auto" else options.dtype
    riding = drafter_class(recipe.drafter.name).uses_verify_pass
    train = replace(train, stage=1 if riding else 2, tuning=tuning, objective="kl", dtype=dtype)
    recipe = replace(recipe, train=train)
    if "context" in drafter_class(recipe.drafter.name).settings:
        # Recipes of earlier versions do not say what a drafter's layers see.
        seen = read_json(run.drafter_dir / "config.json", "the drafter's config").get("context", "answer")
        recipe = replace(recipe, drafter=replace(recipe.drafter, context=seen))
    rounding = rounding_in(run.drafter_dir)
    options = replace(options, dtype=dtype, engine="eager", quantize=rounding)
    if riding:
        template = recipe.chat_template
        backbone = load_backbone(recipe.model, options, gradients=True, chat_template=template)
    else:
        backbone = joint_backbone(recipe, options)
    found = whole_conversations(run, backbone, recipe, data, 0.0)
    kept = found.train[:max_samples]
    # Nothing is trained, but a trainer asks for something to train on.
    dataset = replace(found, train=kept, held_out=kept)
    drafter = build_drafter(backbone, recipe.drafter, dataset)
    if not trained_heads(run, backbone, drafter, adapted=joint):
        raise UserError(f"{run.drafter_dir} holds no heads as {run.recipe_path} describes them", "train them again")
    trainer = Trainer(backbone, drafter, dataset, recipe, run)
    trainer.validation = trainer.task.held_out()
    return trainer.validate(0)


class Trainer:
    """Trains a drafter, and in stage 2 its backbone with it; `events()` runs the training and yields what happens.

    The drafter becomes fp32 (master weights) and computes in the recipe's dtype. With resume, the run's
    checkpoint is taken up where it stopped: the same steps follow with the same batches and rates. In a world of
    several processes each takes its share of every step's micro-batches, so that a step is the same for any number.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: HeadDrafter,
        dataset: Dataset[Any],
        recipe: Recipe,
        run: Run,
        *,
        resume: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        world: Distributed | None = None,
    ) -> None:
        self.backbone, self.recipe, self.run = backbone, recipe, run
        self.should_stop = should_stop
        self.world = world or Distributed()
        train = recipe.train
        self.drafter = drafter.to(backbone.device, torch.float32).train()
        self.task: Task
        if dataset.states is not None:
            self.task = Stage1Cached(backbone, drafter, dataset, train)
        else:
            self.task = (Stage2 if train.stage == 2 else Stage1Online)(backbone, drafter, dataset, train)
        self.digest, self.conversations = dataset.digest, dataset.report.read
        self.arithmetic = checkpoints.arithmetic_of(backbone, dataset.kept)
        groups = self.task.groups()
        self.parameters = [p for group in groups for p in group.parameters]
        self.world.broadcast(self.parameters)
        self.optimizer = optimizer_of(groups, drafter, train, backbone.device.type)
        self.peaks = [one["lr"] for one in self.optimizer.param_groups]
        self.batches = self.task.batches()
        self.positions = _size(self.batches)  # of the whole training, all epochs together
        self.steps = math.ceil(len(self.batches) / train.accumulation)
        self.validation = _first(self.task.held_out(), train.validation_tokens)
        self.step = 0
        self._resumed = resume
        if resume:
            self._restore()

    @property
    def positions_done(self) -> int:
        """Positions of the steps done so far."""
        return _size(self.batches[: self.step * self.recipe.train.accumulation])

    @property
    def _progress(self) -> float:
        """The share of the training done: 1 in the last step, and in the validation after it."""
        return min(1.0, self.step / max(1, self.steps - 1))

    def events(self) -> Iterator[Event]:
        """Run from the present step to the last; the drafter is then trained, in fp32, and not yet saved."""
        train = self.recipe.train
        done = self.positions_done
        if self.world.first and not self._resumed:
            checkpoints.set_checkpoint_aside(self.run)
        if self.validation and train.stage == 2 and self.step == 0:  # what the heads came with
            yield self.validate(done)
        while self.step < self.steps:
            start = time.perf_counter()
            group = self.batches[self.step * train.accumulation :][: train.accumulation]
            meter = Averages()
            if any(self.world.gather(self.should_stop())):
                self.save()
                yield Stopped(self.step, self.steps)
                return
            for (number, items), new in self.world.micro_batches(list(enumerate(group))):
                # A token counts the same in whatever micro-batch it is, and drops the same in whatever process.
                torch.manual_seed(_seed(train.seed, self.step, number))
                self._backward(items, _size([items]) / _size(group) if new else 0.0, meter)
            meter = Averages.of(self.world.gather(meter))
            self.world.add_gradients(self.parameters)
            lr, norm = self._update(group)
            self.step += 1
            done += meter.positions
            loss, losses, accuracies = meter.means()
            seconds = time.perf_counter() - start
            counts = (meter.positions, done, seconds)
            memory = peak_memory(self.backbone.device)
            yield Stepped(
                self.step, self.steps, loss, losses, accuracies, lr, norm, *counts, meter.mean_parts(), memory
            )
            last = self.step == self.steps
            if self.validation and (last or self.step % train.validation_every == 0):
                yield self.validate(done)
            if last or self.step % train.checkpoint_every == 0:
                self.save()
                yield Saved(self.step)

    def _backward(self, items: list[Any], weight: float, meter: Averages) -> None:
        found = self._losses(items)
        value = float(found.total.detach())
        if not math.isfinite(value):
            self._refuse(f"the loss is {value}", items)
        (found.total * weight).backward()
        if weight:
            meter.add(found)

    def _losses(self, items: list[Any]) -> BatchLoss:
        half = self.recipe.train.dtype == "bf16"
        with torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=half):
            return self.task.losses(items, self._progress)

    def _update(self, group: list[list[Any]]) -> tuple[float, float]:
        """Clip, step and clear the gradients; return the heads' rate and the gradients' norm before clipping."""
        train = self.recipe.train
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, train.clip or math.inf))
        if not math.isfinite(norm):
            self._refuse(f"the gradient's norm is {norm}", list(itertools.chain(*group)))
        turns = self.drafter.num_heads if train.heads_in_turn else 1
        turn = turn_of(self._progress, turns)
        first = _up((self.steps - 1) * turn, turns)
        end = _up((self.steps - 1) * (turn + 1), turns) if turn + 1 < turns else self.steps
        share = learning_rate(
            self.step - first, end - first, peak=1.0, min_ratio=train.min_lr_ratio, warmup=train.warmup_steps
        )
        for one, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            one["lr"] = peak * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.peaks[0] * share, norm

    def _refuse(self, what: str, items: list[Any]) -> None:
        names = list(dict.fromkeys(item.id for item in items))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UserError(
            f"{what} at step {self.step + 1} of {self.steps}, on the conversations {shown}",
            f"lower train.lr (now {self.peaks[0]:g}) or leave those conversations out",
        )

    def validate(self, done: int) -> Validated:
        """Loss and accuracies on the held-out answers (at most about validation_tokens positions)."""
        meter = Averages()
        self.drafter.eval()
        # no_grad, not inference_mode: autocast would keep its cast weights for the next training step.
        with torch.no_grad(), self.task.evaluating():
            for items, new in self.world.micro_batches(self.validation):
                found = self._losses(items)
                if new:
                    meter.add(found)
        meter = Averages.of(self.world.gather(meter))
        self.drafter.train()
        return Validated(self.step, *meter.means(), meter.positions, done, meter.mean_parts())

    def save(self) -> None:
        """Write the checkpoint that a resumed training takes up; the first process does."""
        if not self.world.first:
            return
        checkpoints.save(
            self.run,
            checkpoints.Checkpoint(
                drafter=self._drafter_state(),
                optimizer=self.optimizer.state_dict(),
                step=self.step,
                recipe=self.recipe.to_dict(),
                backbone=self.backbone.identity,
                data=self.digest,
                backbone_weights=self.task.state(),
                arithmetic=self.arithmetic,
            ),
        )

    def _drafter_state(self) -> dict[str, torch.Tensor]:
        """Its weights and every buffer: the ids of a draft vocabulary may come with heads that other data gave."""
        return {**self.drafter.state_dict(), **dict(self.drafter.named_buffers())}

    def _restore(self) -> None:
        path = checkpoints.checkpoint_path(self.run)
        checkpoint = checkpoints.load(path)
        checkpoints.check(checkpoint, self.backbone.identity, self.arithmetic, self.digest, self.recipe)
        try:
            self._take_up(checkpoint)
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError, IndexError) as reason:
            raise UserError(f"@resume: {path} is damaged", "delete it and train without @resume") from reason

    def _take_up(self, checkpoint: checkpoints.Checkpoint) -> None:
        self.drafter.load_state_dict({name: checkpoint.drafter[name] for name in self.drafter.state_dict()})
        for name, buffer in self.drafter.named_buffers():
            if name in checkpoint.drafter:  # one of an earlier version has none: they stay as the data makes them
                buffer.copy_(checkpoint.drafter[name])
        self.task.load_state(checkpoint.backbone_weights)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.step = checkpoint.step


def _seed(seed: int, step: int, number: int) -> int:
    """The seed of all that is random in a micro-batch, by its number in a step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{number}".encode()).digest()[:7], "big")


def _up(whole: int, parts: int) -> int:
    """A part of a whole, rounded up."""
    return -(-whole // parts)


def _size(batches: list[list[Any]]) -> int:
    return sum(item.positions for batch in batches for item in batch)


def _first(batches: list[list[Any]], positions: int) -> list[list[Any]]:
    """The first batches, until they hold `positions` positions."""
    kept: list[list[Any]] = []
    while batches and _size(kept) < positions:
        kept.append(batches[len(kept)])
        if len(kept) == len(batches):
            break
    return kept
