"""Hidden states from vLLM's `extract_hidden_states` method, which writes a safetensors file for each request.

A file holds `token_ids` [n] and `hidden_states` [n, layers, H]. Layer id i of the server's
`eagle_aux_hidden_state_layer_ids` stands for the state after i layers, before any norm.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset
from medusa_cli.data.states import StateStore, read_rows
from medusa_cli.errors import UserError, first_line
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.runs.run import Run

log = logging.getLogger(__name__)


def layer_ids(taps: Sequence[int], depth: int) -> list[int]:
    """Returns the layer ids with which a server must be started for a drafter's taps."""
    return [depth if tap == -1 else tap + 1 for tap in taps]


def with_vllm_states(
    dataset: Dataset, run: Run, backbone: Backbone, taps: Sequence[int], world: Distributed
) -> Dataset:
    """Returns the data set with the states in the run's folder `vllm`; conversations without states are left out.

    Raises UserError if a file holds other layers, or if no training conversation has states.
    """
    folder = run.path / "vllm"
    paths = sorted(folder.glob("*.safetensors"))
    files = {_key(_read(path, "token_ids").tolist()): path for path in paths}

    def file_of(item: Conversation) -> Path | None:
        # A server does not run the last token, unless all tokens were in its prompt.
        return files.get(_key(item.tokens[:-1])) or files.get(_key(item.tokens))

    items = [*dataset.train, *dataset.held_out]
    path_of = {item.id: path for item in items if (path := file_of(item)) is not None}
    if len(path_of) < len(items):
        left = len(items) - len(path_of)
        log.warning(f"{left:,} conversations are left out: {folder} has no states of their tokens")
    items = [item for item in items if item.id in path_of]
    starts = [0, *accumulate(len(item.tokens) - 1 for item in items)]
    if not any(item.id in path_of for item in dataset.train):
        ids = layer_ids(taps, backbone.num_layers)
        raise UserError(
            f"{folder} holds no states of the conversations' tokens",
            f"distill with train.states=vllm from a vLLM server that writes the layers {ids} there",
        )

    stored = run.cache_dir / "vllm-states.bin"
    width = backbone.hidden_size * len(taps)
    with world.main_process_first():
        if world.first:
            stored.parent.mkdir(parents=True, exist_ok=True)
            with closing(StateStore(stored, width)) as store:
                store.truncate(0)
                for item in items:
                    states = _states(path_of[item.id], backbone, taps)
                    store.append(states[: len(item.tokens) - 1])
    rows = {
        item.id: (start, len(item.tokens) - 1) for item, start in zip(items, starts, strict=False)
    }

    def kept(part: Sequence[Conversation]) -> list[Conversation]:
        return [replace(item, state_rows=rows[item.id]) for item in part if item.id in rows]

    states = read_rows(stored, width, 0, starts[-1])
    return replace(
        dataset, train=kept(dataset.train), held_out=kept(dataset.held_out), states=states
    )


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).digest()


def _read(path: Path, name: str) -> Tensor:
    """Returns a tensor of a file; raises UserError if the file is damaged or lacks the tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError) as reason:
        fault = f"{path} cannot be read as states that vLLM wrote: {first_line(reason)}"
        raise UserError(fault, "delete it") from reason
    return tensor


@torch.no_grad()
def _states(path: Path, backbone: Backbone, taps: Sequence[int]) -> Tensor:
    """Returns the states [n, H * taps] in a file; the last layer's states are passed through the model's final norm."""
    states = _read(path, "hidden_states")
    expected = (len(taps), backbone.hidden_size)
    if tuple(states.shape[1:]) != expected:
        ids = layer_ids(taps, backbone.num_layers)
        fault = f"{path} holds states of shape {tuple(states.shape)}, not [tokens, {expected[0]}, {expected[1]}]"
        raise UserError(fault, f"start vLLM with eagle_aux_hidden_state_layer_ids {ids}")
    weight = backbone.text_model.norm.weight
    final = backbone.text_model.norm(states[:, -1].to(weight.device, weight.dtype))
    return torch.cat([states[:, :-1].flatten(1), final.to(states)], dim=1)
