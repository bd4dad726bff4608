"""How many conversations are decoded side by side: as many as the free memory holds, and no more than pay."""

import logging
import os
from typing import Any

import torch

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.memory import free_memory
from medusa_cli.distilling.distilled import Settings

# More rows than this gain little on a GPU and nothing on a CPU, and a batch's last answers keep fewer of them busy.
MOST = 64
# Of the free memory, what caches and states may take: the passes need some too.
SHARE = 0.7
log = logging.getLogger(__name__)


def fitting(config: Any, dtype: torch.dtype, capacity: int, free: int, *, states_there: int) -> int:
    """Conversations of `capacity` positions each that `free` bytes hold, from 1 to MOST, for a model's text config.

    Each has keys and values of every layer, and the states of so many layers that lie in the same memory.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * width + config.hidden_size * states_there
    return max(1, min(MOST, int(SHARE * free) // (numbers * dtype.itemsize * capacity)))


def side_by_side(backbone: Backbone, settings: Settings, processes: int) -> int:
    """The conversations at a time that the memory free now holds; says so where they are fewer than usual."""
    shared = backbone.device.type != "cuda"  # by the processes of this machine, and with the states
    free = free_memory(backbone.device) // (int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if shared else 1)
    capacity = min(settings.capacity, backbone.max_positions)
    states = len(settings.taps) + 1 if shared else 0
    count = fitting(backbone.config, backbone.dtype, capacity, free, states_there=states)
    if count < MOST:
        log.info(
            f"{count} conversations at a time: {free / 1e9:.1f} GB are free for their {capacity:,} positions each; "
            "@batch_size N takes others"
        )
    return count
