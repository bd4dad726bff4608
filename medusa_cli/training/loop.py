"""Stage 1: heads learn from the frozen backbone's cached states; the backbone never runs (section 2.2.1)."""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.drafters.base import Drafter, Losses
from medusa_cli.errors import UserError
from medusa_cli.recipe import Recipe
from medusa_cli.run import Run
from medusa_cli.training import checkpoints
from medusa_cli.training.data import Answer, Dataset, pack, plan
from medusa_cli.training.events import Event, Meter, Saved, Stepped, Stopped, Validated
from medusa_cli.training.schedule import learning_rate


class Trainer:
    """Trains a drafter's heads; `events()` runs the training and yields what happens.

    The drafter becomes fp32 (master weights) and computes in the recipe's dtype. With resume, the run's
    checkpoint is taken up where it stopped: the same steps follow with the same batches and rates.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter,
        dataset: Dataset,
        recipe: Recipe,
        run: Run,
        *,
        resume: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.backbone, self.dataset, self.recipe, self.run = backbone, dataset, recipe, run
        self.should_stop = should_stop
        train = recipe.train
        torch.manual_seed(train.seed)
        self.drafter = drafter.to(backbone.device, torch.float32).train()
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": train.weight_decay},
                {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            fused=backbone.device.type in ("cpu", "cuda"),
        )
        self.batches = plan(dataset.train, train.batch_tokens, train.epochs, train.seed, train.max_tokens)
        if not self.batches:
            raise UserError("the training data holds no answer of two tokens or more", "distil more conversations")
        self.steps = math.ceil(len(self.batches) / train.accumulation)
        self.validation = _first(pack(dataset.held_out, train.batch_tokens), train.validation_tokens)
        self.step = 0
        if resume:
            self._restore()

    @property
    def positions(self) -> int:
        """Positions of the whole training, all epochs together."""
        return _size(self.batches)

    @property
    def positions_done(self) -> int:
        """Positions of the steps done so far."""
        return _size(self.batches[: self.step * self.recipe.train.accumulation])

    def events(self) -> Iterator[Event]:
        """Run from the present step to the last; the drafter is then trained, in fp32, and not yet saved."""
        train = self.recipe.train
        done = self.positions_done
        while self.step < self.steps:
            start = time.perf_counter()
            group = self.batches[self.step * train.accumulation :][: train.accumulation]
            meter = Meter()
            for batch in group:
                if self.should_stop():
                    self.optimizer.zero_grad()
                    self.save()
                    yield Stopped(self.step, self.steps)
                    return
                self._backward(batch, len(group), meter)
            lr, norm = self._update(group)
            self.step += 1
            done += meter.positions
            loss, losses, accuracies = meter.means()
            seconds = time.perf_counter() - start
            yield Stepped(self.step, self.steps, loss, losses, accuracies, lr, norm, meter.positions, done, seconds)
            last = self.step == self.steps
            if self.validation and (last or self.step % train.validation_every == 0):
                yield self.validate(done)
            if last or self.step % train.checkpoint_every == 0:
                self.save()
                yield Saved(self.step)

    def _backward(self, answers: list[Answer], share: int, meter: Meter) -> None:
        losses, positions = self._losses(answers)
        value = float(losses.total.detach())
        if not math.isfinite(value):
            self._refuse(f"the loss is {value}", answers)
        if losses.total.requires_grad:  # a cut-off end of one token has no target for any head
            (losses.total / share).backward()
        meter.add(value, losses.per_head, losses.correct, losses.counted, positions)

    def _losses(self, answers: list[Answer]) -> tuple[Losses, int]:
        half = self.recipe.train.dtype == "bf16"
        batch = self.dataset.batch(answers, self.backbone.device, torch.bfloat16 if half else torch.float32)
        with torch.autocast(self.backbone.device.type, torch.bfloat16, enabled=half):
            losses = self.drafter.loss(self.backbone, batch, self.recipe.train.decay, self.recipe.train.soft)
        return losses, len(batch.next)

    def _update(self, group: list[list[Answer]]) -> tuple[float, float]:
        """Clip, step and clear the gradients; return the rate and the gradients' norm before clipping."""
        train = self.recipe.train
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, train.clip or math.inf))
        if not math.isfinite(norm):
            self._refuse(f"the gradient's norm is {norm}", list(itertools.chain(*group)))
        lr = learning_rate(
            self.step, self.steps, peak=train.lr, min_ratio=train.min_lr_ratio, warmup=train.warmup_steps
        )
        for one in self.optimizer.param_groups:
            one["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr, norm

    def _refuse(self, what: str, answers: list[Answer]) -> None:
        names = list(dict.fromkeys(answer.id for answer in answers))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise UserError(
            f"{what} at step {self.step + 1} of {self.steps}, on the conversations {shown}",
            f"lower train.lr (now {self.recipe.train.lr:g}) or leave those conversations out",
        )

    def validate(self, done: int) -> Validated:
        """Loss and accuracies on the held-out answers (at most about validation_tokens positions)."""
        meter = Meter()
        self.drafter.eval()
        # no_grad, not inference_mode: autocast would keep its cast weights for the next training step.
        with torch.no_grad():
            for answers in self.validation:
                losses, positions = self._losses(answers)
                meter.add(float(losses.total), losses.per_head, losses.correct, losses.counted, positions)
        self.drafter.train()
        return Validated(self.step, *meter.means(), meter.positions, done)

    def save(self) -> None:
        """Write the checkpoint that --resume takes up."""
        checkpoints.save(
            checkpoints.checkpoint_path(self.run),
            checkpoints.Checkpoint(
                drafter=self.drafter.state_dict(),
                optimizer=self.optimizer.state_dict(),
                step=self.step,
                rng=torch.get_rng_state(),
                recipe=self.recipe.to_dict(),
                backbone=self.backbone.identity,
                data=self.dataset.digest,
            ),
        )

    def _restore(self) -> None:
        checkpoint = checkpoints.load(checkpoints.checkpoint_path(self.run))
        checkpoints.check(checkpoint, self.backbone.identity, self.dataset.digest, self.recipe)
        self.drafter.load_state_dict(checkpoint.drafter)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng)
        self.step = checkpoint.step


def _size(batches: list[list[Answer]]) -> int:
    return sum(len(answer.tokens) for batch in batches for answer in batch)


def _first(batches: list[list[Answer]], positions: int) -> list[list[Answer]]:
    """The first batches, until they hold `positions` positions."""
    kept: list[list[Answer]] = []
    while batches and _size(kept) < positions:
        kept.append(batches[len(kept)])
        if len(kept) == len(batches):
            break
    return kept
