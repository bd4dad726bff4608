"""The training loop: batches, optimizer, validation and checkpoints."""

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset, positions_of
from medusa_cli.device import peak_memory, return_freed_memory
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.drafters.mtp import Mtp
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.model.lora import trained_weights
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.run import Run
from medusa_cli.train import checkpoint as checkpoints
from medusa_cli.train.log import Logged, Saved, Stepped, Validated
from medusa_cli.train.losses import BatchLoss, stage_1_loss, stage_2_loss
from medusa_cli.train.schedules import learning_rate, peak_rates

CLIP = 1.0  # maximum norm of the gradient
# Number of positions after which freed memory is returned to the system.
POSITIONS_PER_TRIM = 10_000
BETAS = (0.9, 0.95)
# The number of latest steps whose median duration is assumed for each remaining step, and the least duration assumed.
TIMED_STEPS = 64
SHORTEST_S = 1e-6


class _Objective(nn.Module):
    """Computes the loss as a module that holds the trained weights, so that processes can exchange their gradients."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], compute: Callable[[list[Conversation]], BatchLoss]
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self._compute = compute

    def forward(self, items: list[Conversation]) -> BatchLoss:
        return self._compute(items)


class Trainer:
    """Trains a drafter, in stage 2 together with its backbone; `events()` runs the training and yields events.

    The drafter is converted to fp32 (master weights) and computes in the recipe's dtype. With `resume`, training
    continues from the run's checkpoint, with the same batches and learning rates as without the interruption.
    seconds_left: returns the time that is left for the training. If the remaining steps would take longer, the last
    steps are left out, and the learning rate falls to its minimum over the others. If there are several processes, each
    process takes a share of every step's micro-batches, so a step is the same for any number of processes.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: HeadDrafter,
        dataset: Dataset,
        recipe: Recipe,
        run: Run,
        *,
        resume: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        seconds_left: Callable[[], float] | None = None,
        world: Distributed | None = None,
    ) -> None:
        self.backbone = backbone
        self.dataset = dataset
        self.recipe = recipe
        self.run = run
        self.should_stop = should_stop
        self.seconds_left = seconds_left
        self.world = world or Distributed()

        train = recipe.train
        self.drafter = drafter.to(backbone.device, torch.float32).train()
        # The backbone's trainable weights by name.
        self.weights = trained_weights(backbone.model) if train.stage == 2 else {}
        heads = list(trained_weights(drafter).values())
        slow = list(self.weights.values())
        self.parameters = [*heads, *slow]
        # A step may leave weights unused: some experts of an MTP layer may get no token, and stage
        # 2 may train only the heads.
        unused = train.stage == 2 or isinstance(drafter, Mtp)
        objective = _Objective(self.parameters, self._loss)
        self.objective = self.world.exchanging(objective, unused=unused)
        self.peaks = peak_rates(drafter, train)[: 2 if slow else 1]
        self.optimizer = optimizer_of([heads, slow], self.peaks, train, backbone.device.type)
        batches = dataset.schedule(train.batch_tokens, train.epochs, train.seed, train.max_tokens)
        firsts = range(0, len(batches), train.accumulation)
        self.groups = [batches[first : first + train.accumulation] for first in firsts]
        self.sizes = [sum(map(positions_of, group)) for group in self.groups]
        # The number of steps to run. `_fit` makes it smaller if not all steps fit in the time.
        self.steps = len(self.groups)

        self.validation = []
        measured = 0
        for batch in dataset.micro_batches(dataset.held_out, train.batch_tokens):
            if measured < train.validation_tokens:
                self.validation.append(batch)
                measured += positions_of(batch)

        self.step = 0
        # Step and simulated acceptance length of the best validation.
        self.best: tuple[int, float] | None = None
        if resume:
            self._restore()

    def progress(self, step: int) -> float:
        """Returns the fraction of the training that is done: 1 in the last step, and in the validation after it."""
        return min(1.0, step / max(1, self.steps - 1))

    @property
    def positions(self) -> int:
        """Returns the number of positions in the whole training run, over all epochs."""
        return sum(self.sizes[: self.steps])

    @property
    def positions_done(self) -> int:
        """Returns the number of positions in the steps done so far."""
        return sum(self.sizes[: self.step])

    def events(self) -> Iterator[Logged]:
        """Runs steps until the last one, or until `should_stop` returns True; writes a checkpoint at the end."""
        train = self.recipe.train
        if self.validation and train.stage == 2 and self.step == 0:
            yield self._validate_and_keep()
        # The first step also allocates memory, so it is not timed.
        ends = deque[float](maxlen=TIMED_STEPS + 1)
        while self.step < self.steps and not any(self.world.gather(self.should_stop())):
            before = self.positions_done
            yield self.train_step()
            ends.append(time.perf_counter())
            self._fit([end - begin for begin, end in pairwise(ends)])
            if self.positions_done // POSITIONS_PER_TRIM > before // POSITIONS_PER_TRIM:
                return_freed_memory()
            last = self.step == self.steps
            if self.validation and (last or self.step % train.validation_every == 0):
                yield self._validate_and_keep()
            if not last and self.step % train.checkpoint_every == 0:
                self.save()
                yield Saved(self.step)
        # A run that is stopped early may have been started by mistake, so it keeps the earlier
        # run's files.
        self.save(keep_earlier=self.step < self.steps)
        yield Saved(self.step)

    def _fit(self, durations: list[float]) -> None:
        """Leaves out the steps that do not fit in the remaining time, by the median of the latest steps' durations."""
        if self.seconds_left is None:
            return
        left = self.seconds_left()
        if left <= 0.0:
            self.steps = self.step
        elif durations:
            fitting = int(left / max(median_low(durations), SHORTEST_S))
            self.steps = min(len(self.groups), self.step + fitting)

    def train_step(self) -> Stepped:
        """Runs the next step and returns its record."""
        start = time.perf_counter()
        group = self.groups[self.step]
        size = self.sizes[self.step]
        losses = []
        batches = self.world.micro_batches(list(enumerate(group)))
        for place, ((number, items), counts) in enumerate(batches, 1):
            # Each micro-batch has its own seed, so that its dropout is the same in whichever process it runs.
            torch.manual_seed(
                random.Random(f"{self.recipe.train.seed}:{self.step}:{number}").getrandbits(56)
            )
            with self.world.sharing_gradients(self.objective, place == len(batches)):
                loss = self.objective(items)
                # Every token has the same weight in all micro-batches.
                share = positions_of(items) / size if counts else 0.0
                (loss.total * (share * self.world.size)).backward()
            if counts:
                losses.append(replace(loss, total=loss.total.detach()))

        norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        # In a step, the host waits for a GPU only here.
        sums, [grad_norm] = read(losses, norm)
        self._check(sums, [items for (_, items), counts in batches if counts], grad_norm)
        lr = self._update()
        self.step += 1
        return Stepped(
            self.step,
            self.steps,
            lr=lr,
            grad_norm=grad_norm,
            total_positions=self.positions_done,
            seconds=time.perf_counter() - start,
            memory=peak_memory(self.backbone.device),
            **means(sums, self.world),
        )

    def _loss(self, items: list[Conversation]) -> BatchLoss:
        """Returns the loss of a micro-batch in this step."""
        train = self.recipe.train
        progress = self.progress(self.step)
        with torch.autocast(
            self.backbone.device.type, torch.bfloat16, enabled=train.dtype == "bf16"
        ):
            if train.stage == 1:
                return stage_1_loss(self.backbone, self.drafter, self.dataset, train, items)
            return stage_2_loss(self.backbone, self.drafter, train, items, progress)

    def _check(
        self, sums: list[dict[str, Any]], batches: list[list[Conversation]], grad_norm: float
    ) -> None:
        """Raises UserError if a loss or the gradient's norm is not finite."""
        for own, items in zip(sums, batches, strict=True):
            if not math.isfinite(own["loss"]):
                self._refuse(f"the loss is {own['loss']}", items)
        if not math.isfinite(grad_norm):
            self._refuse(f"the gradient's norm is {grad_norm}", list(itertools.chain(*batches)))

    def _refuse(self, what: str, items: list[Conversation]) -> None:
        names = list(dict.fromkeys(item.id for item in items))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UserError(
            f"{what} at step {self.step + 1} of {self.steps}, on the conversations {shown}",
            f"lower train.lr (now {self.peaks[0]:g}) or leave those conversations out",
        )

    def _update(self) -> float:
        """Applies and clears the gradients; returns the heads' learning rate."""
        train = self.recipe.train
        share = learning_rate(
            self.step, self.steps, min_ratio=train.min_lr_ratio, warmup=train.warmup_steps
        )
        for settings, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            settings["lr"] = peak * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.peaks[0] * share

    def validate(self) -> Validated:
        """Returns the loss and accuracies on held-out answers, limited to about validation_tokens positions."""
        modules = [self.drafter, *([self.backbone.model] if self.weights else [])]
        losses = []
        for module in modules:
            module.eval()
        # This uses no_grad, because under inference_mode, autocast would keep its cast weights for
        # the next training step.
        with torch.no_grad():
            for items, counts in self.world.micro_batches(self.validation):
                loss = self._loss(items)
                if counts:
                    losses.append(loss)
        for module in modules:
            module.train()
        sums, _ = read(losses)
        return Validated(self.step, total_positions=self.positions_done, **means(sums, self.world))

    def _validate_and_keep(self) -> Validated:
        """Validates, and saves the weights if their simulated acceptance length is the highest so far."""
        event = self.validate()
        if self.step and (self.best is None or event.acceptance > self.best[1]):
            self.best = self.step, event.acceptance
            if self.world.first:
                best = checkpoints.Best(self.step, event.acceptance, self._detached())
                checkpoints.save_best(self.run, best)
        return event

    def take_best(self) -> None:
        """Replaces the weights of the last step with those of the best validation."""
        if self.best is None or self.best[0] == self.step:
            return
        best = checkpoints.load_best(self.run)
        if best is None:
            return
        try:
            self._copy(best.tensors)
        except (KeyError, RuntimeError, TypeError, AttributeError) as reason:
            path = checkpoints.best_path(self.run)
            raise UserError(
                f"@resume: {path} is damaged", "delete it and train without @resume"
            ) from reason

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[name])

    def _detached(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the drafter tensors that a checkpoint keeps, and the trainable weights of the backbone."""
        # Buffers are included, because one holds the draft vocabulary, which copied heads may bring from other data.
        own = [*self.drafter.named_parameters(), *self.drafter.named_buffers()]
        return {
            **dict(own),
            **{f"backbone.{name}": weight for name, weight in self.weights.items()},
        }

    def save(self, *, keep_earlier: bool = False) -> None:
        """Writes the checkpoint from which training can resume; only the first process writes it.

        keep_earlier: keep the files of an earlier training run that were set aside.
        """
        if not self.world.first:
            return
        checkpoint = checkpoints.Checkpoint(
            step=self.step,
            tensors=self._detached(),
            optimizer=self.optimizer.state_dict(),
            recipe=self.recipe.to_dict(),
            backbone=self.backbone.identity,
            data=self.dataset.digest,
            arithmetic=checkpoints.arithmetic_of(self.backbone, self.dataset.kept),
        )
        checkpoints.save(self.run, checkpoint, keep_earlier=keep_earlier)

    def _restore(self) -> None:
        path = checkpoints.checkpoint_path(self.run)
        checkpoint = checkpoints.load(path)
        checkpoints.check(checkpoint, self.backbone, self.dataset, self.recipe)
        try:
            self._copy(checkpoint.tensors)
            if (
                not 0
                <= self.drafter.draft_ids.min()
                <= self.drafter.draft_ids.max()
                < self.backbone.vocab_size
            ):
                raise ValueError("an id beyond the vocabulary")
            if not 0 <= checkpoint.step <= self.steps:
                raise ValueError("a step after the last one")
            self.optimizer.load_state_dict(checkpoint.optimizer)
        except (
            KeyError,
            ValueError,
            RuntimeError,
            TypeError,
            AttributeError,
            IndexError,
        ) as reason:
            raise UserError(
                f"@resume: {path} is damaged", "delete it and train without @resume"
            ) from reason
        self.step = checkpoint.step
        best = checkpoints.load_best(self.run)
        # Steps after the checkpoint are run again, including their validations.
        if best is not None and best.step <= self.step:
            self.best = best.step, best.acceptance


def optimizer_of(
    groups: list[list[nn.Parameter]], rates: list[float], train: TrainRecipe, device: str
) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer for groups of parameters, each with its own learning rate."""
    settings = [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=False)]
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(settings, betas=BETAS, weight_decay=0.0)
    return torch.optim.AdamW(
        settings, betas=BETAS, weight_decay=0.0, fused=device in ("cpu", "cuda")
    )


def read(losses: Sequence[BatchLoss], *others: Tensor) -> tuple[list[dict[str, Any]], list[float]]:
    """Returns the figures of micro-batches as sums, and the values of `others`; the host waits for the device once."""
    if not losses and not others:
        return [], []
    vectors = [loss.figures for loss in losses]
    rest = [other[None] for other in others]
    numbers = torch.cat([*vectors, *rest]).cpu().double()
    *figures, last = numbers.split([*map(len, vectors), len(rest)])
    sums = [loss.sums(own) for loss, own in zip(losses, figures, strict=True)]
    return sums, last.tolist()


def means(sums: Sequence[dict[str, Any]], world: Distributed) -> dict[str, Any]:
    """Returns the mean loss, head losses, accuracies and parts over the micro-batches of all processes.

    A head without a target has no loss and no accuracy (None). positions: the total number of positions.
    """
    every = [batch for own in world.gather(sums) for batch in own]
    total = {name: sum(batch[name] for batch in every) for name in every[0] if name != "parts"}
    parts = {name: sum(batch["parts"][name] for batch in every) for name in every[0]["parts"]}
    return {
        "loss": total["loss"] / total["positions"],
        "head_losses": quotients(total["head_losses"], total["learned"]),
        "accuracies": quotients(total["correct"], total["counted"]),
        "positions": total["positions"],
        "parts": {name: part / total["positions"] for name, part in parts.items()},
    }


def quotients(sums: Tensor, counts: Tensor) -> list[float | None]:
    """Returns each sum [K] divided by its count [K]; None where the count is zero."""
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    return [value / count if count else None for value, count in pairs]
