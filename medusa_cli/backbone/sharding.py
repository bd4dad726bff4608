"""A network's layers split over several processes: each holds a part of every matrix, and gathers a layer to run it."""

from itertools import chain
from typing import Any

import torch

from medusa_cli.backbone.layers import decoder_layers


def split_layers(network: Any, device: str) -> None:
    """Freeze a network and split the matrices of its decoder layers over all processes, layer by layer.

    It may lie on the CPU: no more than one whole layer at a time goes to the device. What is outside the layers, and
    every vector, is whole on each process. From then on all processes must make the same passes, forward and backward.
    UserError for a network without a list of layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    base = network.base_model
    layers = decoder_layers(network, "@shard")
    mesh = init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))
    network.requires_grad_(False)
    for layer in layers:
        layer.to(device)
        # Vectors weigh next to nothing, and the identity of a backbone reads its norms.
        fully_shard(layer, mesh=mesh, ignored_params={one for one in layer.parameters() if one.dim() < 2})
    # It splits nothing more, but makes one pass of the layers' own: the next layer is gathered while one runs.
    kind = type(base)
    fully_shard(base, mesh=mesh, ignored_params=set(base.parameters()))
    base.__class__ = kind  # transformers knows by its name which states a model can return
    for tensor in chain(network.parameters(), network.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
