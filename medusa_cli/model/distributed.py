"""Several processes under torchrun (or accelerate launch): ranks, shares of the work, and sums of gradients."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch import nn

from medusa_cli.errors import UsageError, UserError
from medusa_cli.model.backbone import text_model

# Processes wait for one another when they share work, and the durations of their shares may differ by hours.
TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Distributed:
    """Holds this process's rank among `size` processes (0 of 1 by default), and its rank on its machine.

    Rank 0 writes and prints. sharded: the model's layers are split over the processes, which must
    all run the same passes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    sharded: bool = False

    @classmethod
    def join(
        cls, device: str = "auto", backend: str | None = None, sharded: bool = False
    ) -> "Distributed":
        """Reads the launcher's environment variables and joins the process group.

        If each process has a GPU, tensors on GPUs are summed through NCCL, all others through gloo. A given `backend`
        is used for all tensors instead. Raises UsageError if a machine has fewer GPUs than processes.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(sharded=sharded)
        world = cls(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")), sharded)
        own_gpu = world.device(device) != device
        if own_gpu:
            count = torch.cuda.device_count()
            if world.local_rank >= count:
                raise UsageError(
                    f"process {world.local_rank + 1} of this machine has no GPU of its own: there are {count}",
                    f"start `torchrun --nproc_per_node {count} ...`, or give @device cpu",
                )
            torch.cuda.set_device(world.local_rank)
        if not torch.distributed.is_initialized():
            backend = backend or ("cpu:gloo,cuda:nccl" if own_gpu else "gloo")
            torch.distributed.init_process_group(backend, timeout=TIMEOUT)
        return world

    @property
    def first(self) -> bool:
        return self.rank == 0

    def device(self, asked: str) -> str:
        """Returns the device of this process; if there are several processes on CUDA, each has one GPU."""
        as_asked = self.size == 1 or asked not in ("auto", "cuda") or not torch.cuda.is_available()
        return asked if as_asked else f"cuda:{self.local_rank}"

    def strided_shard(self, items: Sequence[Any]) -> list[Any]:
        """Returns every `size`-th item, starting at this process's rank."""
        return list(items[self.rank :: self.size])

    def micro_batches(self, items: Sequence[Any]) -> list[tuple[Any, bool]]:
        """Returns this process's strided shard; each item is paired with True if it counts.

        Every process must run the same number of passes, because it exchanges gradients, or layers of
        a sharded model, with the others. A process that has fewer items repeats the last of all items;
        the repeated item does not count.
        """
        own = [(item, True) for item in self.strided_shard(items)]
        missing = -len(items) % self.size
        return [*own, (items[-1], False)] if self.rank >= self.size - missing else own

    def exchanging(self, module: nn.Module, *, unused: bool) -> nn.Module:
        """Returns a module whose gradients are averaged over the processes.

        In every process, its weights are set to those of the first process.
        unused: some weights may have no gradient; a gradient that no process has stays None.
        """
        if self.size == 1:
            return module
        return nn.parallel.DistributedDataParallel(
            module, broadcast_buffers=False, find_unused_parameters=unused
        )

    def sharing_gradients(self, module: Any, last: bool) -> AbstractContextManager[None]:
        """Returns a context for a pass through an `exchanging` module; only a step's last pass shares gradients."""
        return nullcontext() if last or self.size == 1 else module.no_sync()

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in order of rank; the values should be small."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Runs the block in the first process, then in the others, which may read what the first wrote."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def wait(self) -> None:
        """Waits until all processes have reached this point."""
        if self.size > 1:
            torch.distributed.barrier()

    def destroy(self) -> None:
        """Leaves the process group at the end."""
        if self.size > 1:
            torch.distributed.destroy_process_group()


def split_layers(network: Any, device: str) -> None:
    """Freezes a network and splits the matrices of its decoder layers over all processes.

    At most one whole layer at a time is on the device. Vectors, and tensors outside the layers, are not split. All
    processes must then run the same passes. Raises UserError for a network without a list of layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    base = text_model(network)
    depth = network.config.get_text_config().num_hidden_layers
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    layers = next((modules for modules in lists if len(modules) == depth), None)
    if layers is None:
        fault = f"train.shard: the model type {network.config.model_type!r} has no list of layers"
        raise UserError(fault, "leave it out")
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    network.requires_grad_(False)
    for layer in layers:
        layer.to(device)
        # Vectors are small, so they are not split.
        fully_shard(
            layer,
            mesh=mesh,
            ignored_params={weight for weight in layer.parameters() if weight.dim() < 2},
        )
    # This call splits nothing more, but allows a layer to be gathered while the previous one runs.
    kind = type(base)
    fully_shard(base, mesh=mesh, ignored_params=set(base.parameters()))
    base.__class__ = kind  # transformers chooses the states to return by class name
    for tensor in chain(network.parameters(), network.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
