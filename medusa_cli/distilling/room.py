"""How many conversations are decoded side by side: as many as the free memory holds, and no more than pay."""

from typing import Any

import torch

# More rows than this gain little on a GPU and nothing on a CPU, and a batch's last answers keep fewer of them busy.
MOST = 64
# Of the free memory, what caches and states may take: the passes need some too.
SHARE = 0.7


def fitting(config: Any, dtype: torch.dtype, capacity: int, free: int, *, states_there: bool) -> int:
    """Conversations of `capacity` positions each that `free` bytes hold, from 1 to MOST, for a model's text config.

    Each has keys and values of every layer, and its final states, where those lie in the same memory (states_there).
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * heads * width + (config.hidden_size if states_there else 0)
    return max(1, min(MOST, int(SHARE * free) // (numbers * dtype.itemsize * capacity)))
