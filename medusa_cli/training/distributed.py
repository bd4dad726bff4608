"""Several processes under torchrun (or accelerate launch): who they are, and what they add up."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from medusa_cli.errors import UsageError

# How long processes wait for one another: where they share work, their shares may differ by hours.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """This process's number among `size`, and its number on its machine; 0 of 1 alone. Number 0 writes and prints."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def join(cls, device: str = "auto", backend: str | None = None) -> "World":
        """What the launcher's environment variables say; the processes find each other at the first call.

        Where the device asked for gives each a GPU of its own, they sum what lies there through NCCL; all else, or
        all by a named backend, goes through gloo. UsageError where there are fewer GPUs than processes.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        world = cls(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))
        own = world.device(device) != device
        if own:
            count = torch.cuda.device_count()
            if world.local_rank >= count:
                raise UsageError(
                    f"process {world.local_rank + 1} of this machine finds only {count} GPUs",
                    f"start `torchrun --nproc_per_node {count} ...`, or give @device cpu",
                )
            torch.cuda.set_device(world.local_rank)
        if not torch.distributed.is_initialized():
            backend = backend or ("cpu:gloo,cuda:nccl" if own else "gloo")
            torch.distributed.init_process_group(backend, timeout=PATIENCE)
        return world

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, asked: str) -> str:
        """The device of this process: under several processes on CUDA, each its own."""
        alone = self.size == 1 or asked not in ("auto", "cuda") or not torch.cuda.is_available()
        return asked if alone else f"cuda:{self.local_rank}"

    def share(self, items: Sequence[Any]) -> list[Any]:
        """This process's part of some items."""
        return list(items[self.rank :: self.size])

    def stretch(self, items: Sequence[Any]) -> list[Any]:
        """This process's part of some items, those of all processes being the items in their order."""
        first, end = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return list(items[first:end])

    def turns(self, items: Sequence[Any], together: bool) -> list[tuple[Any, bool]]:
        """This process's part of some items, each with whether it counts.

        together: as many for every process, as passes through a split model must be; whoever has none left takes the
        last one again, which does not count.
        """
        turns = [(one, True) for one in self.share(items)]
        missing = -len(items) % self.size if together else 0
        return [*turns, (items[-1], False)] if self.rank >= self.size - missing else turns

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes; one that no process has stays None."""
        if self.size == 1:
            return
        # To an optimizer a gradient of zeros is a step, and none at all is not: they must not be taken for each other.
        found = torch.tensor([float(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(found)
        for parameter, known in zip(parameters, found.tolist(), strict=True):
            if not known:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def spread(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give every process the first one's weights."""
        if self.size > 1:
            for parameter in parameters:
                torch.distributed.broadcast(parameter.data, 0)

    def gather(self, value: Any) -> list[Any]:
        """The small objects of all processes, in order of their ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    @contextmanager
    def first_ahead(self) -> Iterator[None]:
        """What the first process does, and writes, before the others do it."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def wait(self) -> None:
        """Go on when all are here."""
        if self.size > 1:
            torch.distributed.barrier()

    def leave(self) -> None:
        """Part from the others at the end."""
        if self.size > 1:
            torch.distributed.destroy_process_group()
