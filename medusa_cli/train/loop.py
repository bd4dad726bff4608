"""The training loop: batches, optimizer, learning rate, validation and checkpoints."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from medusa_cli.data.packing import Dataset, micro_batches, schedule
from medusa_cli.drafters.heads import HeadDrafter
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.model.load import peak_memory
from medusa_cli.runs.recipe import Recipe, TrainRecipe
from medusa_cli.runs.run import Run
from medusa_cli.train import checkpoint as checkpoints
from medusa_cli.train.log import Logged, Saved, Stepped, Stopped, Validated
from medusa_cli.train.losses import BatchLoss
from medusa_cli.train.stages import Stage1, Stage2

CLIP = 1.0  # of the gradient's norm
BETAS = (0.9, 0.95)


class Trainer:
    """Trains a drafter, and in stage 2 its backbone with it; `events()` runs the training and yields what happens.

    The drafter becomes fp32 (master weights) and computes in the recipe's dtype. With resume, the run's checkpoint
    is resumed: the same steps follow with the same batches and rates. Of several processes each takes a share of
    every step's micro-batches, so that a step is the same for any number of them.
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
        self.backbone, self.dataset, self.recipe, self.run = backbone, dataset, recipe, run
        self.should_stop = should_stop
        self.world = world or Distributed()
        train = recipe.train
        self.drafter = drafter.to(backbone.device, torch.float32).train()
        self.stage = (Stage1 if train.stage == 1 else Stage2)(backbone, drafter, dataset, train)
        heads = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        slow = list(self.stage.weights.values())
        self.parameters = [*heads, *slow]
        self.world.broadcast(self.parameters)
        self.peaks = peak_rates(drafter, train)[: 2 if slow else 1]
        self.optimizer = optimizer_of([heads, slow], self.peaks, train, backbone.device.type)
        self.batches = schedule(dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)
        self.positions = _size(self.batches)  # of the whole training, all epochs together
        self.steps = math.ceil(len(self.batches) / train.accumulation)
        validation = micro_batches(dataset.held_out, train.batch_tokens)
        before = [0, *itertools.accumulate(_size([batch]) for batch in validation)]
        self.validation = [
            batch for batch, size in zip(validation, before, strict=False) if size < train.validation_tokens
        ]
        self.step = 0
        if resume:
            self._restore()

    @property
    def positions_done(self) -> int:
        """Positions of the steps done so far."""
        return _size(self.batches[: self.step * self.recipe.train.accumulation])

    def events(self) -> Iterator[Logged]:
        """Runs from the present step to the last; the drafter is then trained, in fp32, and not yet saved."""
        train = self.recipe.train
        done = self.positions_done
        if self.validation and train.stage == 2 and self.step == 0:
            yield self.validate(done)
        while self.step < self.steps:
            start = time.perf_counter()
            if any(self.world.gather(self.should_stop())):
                self.save()
                yield Stopped(self.step, self.steps)
                return
            group = self.batches[self.step * train.accumulation :][: train.accumulation]
            sums: list[dict[str, Tensor]] = []
            for (number, items), counts in self.world.micro_batches(list(enumerate(group))):
                # The seed belongs to the micro-batch, so that any process drops the same.
                torch.manual_seed(_seed(train.seed, self.step, number))
                loss = self._loss(items)
                if not math.isfinite(float(loss.total.detach())):
                    self._refuse(f"the loss is {float(loss.total.detach())}", items)
                # A token counts the same in whatever micro-batch it is.
                (loss.total * (_size([items]) / _size(group) if counts else 0.0)).backward()
                if counts:
                    sums.append(sums_of(loss))
            mean = self._mean(sums)
            self.world.add_gradients(self.parameters)
            lr, norm = self._update(group)
            self.step += 1
            done += mean["positions"]
            seconds, memory = time.perf_counter() - start, peak_memory(self.backbone.device)
            yield Stepped(
                self.step,
                self.steps,
                lr=lr,
                grad_norm=norm,
                total_positions=done,
                seconds=seconds,
                memory=memory,
                **mean,
            )
            last = self.step == self.steps
            if self.validation and (last or self.step % train.validation_every == 0):
                yield self.validate(done)
            if last or self.step % train.checkpoint_every == 0:
                self.save()
                yield Saved(self.step)

    def _loss(self, items: list[Any]) -> BatchLoss:
        # 1 in the last step, and in the validation after it.
        progress = min(1.0, self.step / max(1, self.steps - 1))
        half = self.recipe.train.dtype == "bf16"
        with torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=half):
            return self.stage.loss(items, progress)

    def _mean(self, sums: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
        """Returns the means of micro-batches' sums over all processes."""
        return means(self.world.gather(added(sums)))

    def _update(self, group: list[list[Any]]) -> tuple[float, float]:
        """Clips, steps and clears the gradients; returns the heads' rate and the gradients' norm before clipping."""
        train = self.recipe.train
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP))
        if not math.isfinite(norm):
            self._refuse(f"the gradient's norm is {norm}", list(itertools.chain(*group)))
        share = learning_rate(self.step, self.steps, min_ratio=train.min_lr_ratio, warmup=train.warmup_steps)
        for settings, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            settings["lr"] = peak * share
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
        """Returns loss and accuracies on the held-out answers (at most about validation_tokens positions)."""
        modules = [self.drafter, *([self.backbone.model] if self.stage.weights else [])]
        for module in modules:
            module.eval()
        # no_grad, not inference_mode: autocast would keep its cast weights for the next training step.
        with torch.no_grad():
            losses = [(self._loss(items), counts) for items, counts in self.world.micro_batches(self.validation)]
        for module in modules:
            module.train()
        mean = self._mean(sums_of(loss) for loss, counts in losses if counts)
        return Validated(self.step, total_positions=done, **mean)

    def save(self) -> None:
        """Writes the checkpoint that a resumed training begins with; the first process does."""
        if not self.world.first:
            return
        checkpoints.save(
            self.run,
            checkpoints.Checkpoint(
                # Buffers too: the ids of a draft vocabulary may come with heads that other data gave.
                drafter={**self.drafter.state_dict(), **dict(self.drafter.named_buffers())},
                optimizer=self.optimizer.state_dict(),
                step=self.step,
                recipe=self.recipe.to_dict(),
                backbone=self.backbone.identity,
                data=self.dataset.digest,
                backbone_weights={name: weight.detach() for name, weight in self.stage.weights.items()},
                arithmetic=checkpoints.arithmetic_of(self.backbone, self.dataset.kept),
            ),
        )

    def _restore(self) -> None:
        path = checkpoints.checkpoint_path(self.run)
        checkpoint = checkpoints.load(path)
        checkpoints.check(checkpoint, self.backbone, self.dataset, self.recipe)
        try:
            self.drafter.load_state_dict({name: checkpoint.drafter[name] for name in self.drafter.state_dict()})
            with torch.no_grad():
                for name, buffer in self.drafter.named_buffers():
                    buffer.copy_(checkpoint.drafter[name])
                for name, weight in self.stage.weights.items():
                    weight.copy_(checkpoint.backbone_weights[name])
            self.optimizer.load_state_dict(checkpoint.optimizer)
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError, IndexError) as reason:
            raise UserError(f"@resume: {path} is damaged", "delete it and train without @resume") from reason
        self.step = checkpoint.step


def peak_rates(drafter: HeadDrafter, train: TrainRecipe) -> list[float]:
    """Returns the peak learning rates of the heads (by default their kind's) and of the backbone (a quarter of it)."""
    heads = drafter.learning_rate if train.lr is None else train.lr
    return [heads, heads / 4 if train.backbone_lr is None else train.backbone_lr]


def optimizer_of(
    groups: list[list[nn.Parameter]], rates: list[float], train: TrainRecipe, device: str
) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer over groups of parameters, each with its rate."""
    settings = [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=False)]
    if train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(settings, betas=BETAS, weight_decay=0.0)
    return torch.optim.AdamW(settings, betas=BETAS, weight_decay=0.0, fused=device in ("cpu", "cuda"))


def learning_rate(step: int, steps: int, *, min_ratio: float, warmup: int) -> float:
    """Returns the share of the peak rate at step `step` (from 0) of `steps`; the warmup takes at most a tenth."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def sums_of(loss: BatchLoss) -> dict[str, Tensor]:
    """Returns a micro-batch's sums, of which `means` makes means.

    The loss weighs its positions, a head's loss its targets: the means do not depend on how answers are batched.
    """
    learnt = loss.learnt.cpu()
    values = {"loss": float(loss.total.detach()), **{f"parts {name}": value for name, value in loss.parts.items()}}
    return {
        **{name: torch.tensor(loss.positions * value, dtype=torch.double) for name, value in values.items()},
        "head_losses": learnt * loss.per_head.detach().double().cpu(),
        "learnt": learnt,
        "correct": loss.correct.cpu(),
        "counted": loss.counted.cpu(),
        "positions": torch.tensor(loss.positions),
    }


def added(sums: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the sum of several micro-batches' sums."""
    total: dict[str, Tensor] = {}
    for part in sums:
        total = (
            {name: total[name] + value if name in total else value for name, value in part.items()} if part else total
        )
    return total


def means(sums: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
    """Returns mean loss, loss and top-1 accuracy of each head, positions and the mean of every other part."""
    total = added(sums)
    positions = int(total["positions"])
    return {
        "loss": float(total["loss"]) / positions,
        "head_losses": (total["head_losses"] / total["learnt"].clamp(min=1)).tolist(),
        "accuracies": (total["correct"].double() / total["counted"].clamp(min=1)).tolist(),
        "positions": positions,
        "parts": {name[6:]: float(value) / positions for name, value in total.items() if name.startswith("parts ")},
    }


def _seed(seed: int, step: int, number: int) -> int:
    """Returns the random seed of a micro-batch, by its number in a step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{number}".encode()).digest()[:7], "big")


def _size(batches: list[list[Any]]) -> int:
    return sum(item.positions for batch in batches for item in batch)
