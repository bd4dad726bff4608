"""Hidden states as bf16 rows on disk: kept from distillation, cached in a run, or computed once by a prefill."""

import hashlib
import json
import logging
import mmap
import os
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset
from medusa_cli.device import upload
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.errors import UserError
from medusa_cli.files.io import check_regular
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.progress import ShowProgress, show_nothing
from medusa_cli.runs.run import SHAPE, Run, check_backbone, describe_distillation, same

# Maximum number of tokens, padding included, in one pass over several conversations on a GPU.
PACK_TOKENS = 8192
log = logging.getLogger(__name__)


def states_digest(conversation: Conversation, rows: Tensor) -> str:
    """Returns a digest of a conversation and its state rows [n, W], which shows whether the rows have changed."""
    text = json.dumps([conversation.id, conversation.tokens, conversation.spans])
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    digest.update(_raw(rows))
    return digest.hexdigest()


def _raw(rows: Tensor) -> bytes:
    """Returns the bytes of rows as they are stored on disk."""
    return rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def read_rows(path: Path, width: int, first: int, count: int) -> Tensor:
    """Returns `count` >= 1 rows of a file, from row `first` on, as read-only bf16 [count, W].

    The rows are memory-mapped and shared between processes, because a private mapping counts in
    full as used memory. Raises UserError if the file is too short.
    """
    row = 2 * width
    with path.open("rb") as file:
        if (first + count) * row > os.fstat(file.fileno()).st_size:
            fault = f"{path} ends before state row {first + count}"
            raise UserError(fault, "delete it to compute the states again")
        mapped = mmap.mmap(file.fileno(), (first + count) * row, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        rows = torch.frombuffer(
            mapped, dtype=torch.bfloat16, offset=first * row, count=count * width
        )
    return rows.view(count, width)


class StateStore:
    """Manages a file of little-endian bf16 rows [W] without a header; callers keep track of their row numbers."""

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.width = width
        self._row_bytes = 2 * width
        check_regular(path)
        path.touch(exist_ok=True)
        self._out = path.open("r+b")

    @property
    def rows(self) -> int:
        """Returns the number of whole rows in the file."""
        return os.fstat(self._out.fileno()).st_size // self._row_bytes

    def append(self, rows: Tensor) -> int:
        """Appends rows [n, W] and returns the number of the first row."""
        first = self.rows
        self.write(rows, first)
        return first

    def write(self, rows: Tensor, first: int) -> None:
        """Writes rows [n, W] from row number `first` on, and flushes them."""
        self._out.seek(first * self._row_bytes)
        self._out.write(_raw(rows))
        self._out.flush()

    def truncate(self, rows: int) -> None:
        """Keeps only the first `rows` rows of the file; pads a shorter file with zeros."""
        self._out.truncate(rows * self._row_bytes)

    def sync(self) -> None:
        """Waits until every row is on disk."""
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()


def rounding(backbone: Backbone) -> str | None:
    """Returns how a backbone's weights are quantized, by its engine or on loading; None if they are not."""
    rounded: str | None = backbone.engine.quantize or backbone.identity.get("rounding")
    return rounded


def with_hidden_states(
    dataset: Dataset,
    run: Run,
    backbone: Backbone,
    path: Path,
    taps: Sequence[int] = (-1,),
    *,
    among: Dataset | None = None,
    world: Distributed | None = None,
    show: ShowProgress = show_nothing,
) -> Dataset:
    """Returns the data set of the file `path` with its hidden states: kept, cached in the run, or computed.

    Kept states were stored during distillation. among: a larger data set, whose states are used if
    they are cached. world: the processes that share the computation. show: called with a name, the
    number of tokens done and the total. Raises UserError if the states belong to other data.
    """
    world = world or Distributed()
    owner = Run(path.parent).owner
    if owner is not None:
        check_backbone(owner, backbone.identity, f"{path}")
    if kept := _kept(dataset, backbone, path, taps):
        return kept
    needed = _in_order(among or dataset)
    cached = _cache_path(run, backbone, needed, taps)
    if among is not None and not cached.is_file():
        needed = _in_order(dataset)
        cached = _cache_path(run, backbone, needed, taps)
    starts = [0, *accumulate(len(item.tokens) - 1 for item in needed)]
    if not world.gather(cached.is_file())[0]:  # all processes follow the first process
        _prefill(cached, backbone, needed, starts, taps, world, show)

    rows = {
        item.id: (start, len(item.tokens) - 1) for item, start in zip(needed, starts, strict=False)
    }
    train = [replace(item, state_rows=rows[item.id], states_digest=None) for item in dataset.train]
    held_out = [
        replace(item, state_rows=rows[item.id], states_digest=None) for item in dataset.held_out
    ]
    states = read_rows(cached, backbone.hidden_size * len(taps), 0, starts[-1])
    return replace(dataset, train=train, held_out=held_out, states=states)


def tokens_to_run(
    dataset: Dataset, run: Run, backbone: Backbone, path: Path, taps: Sequence[int]
) -> int:
    """Returns how many tokens the model must run to get a data set's states: 0 if they are kept or cached."""
    items = _in_order(dataset)
    if _cache_path(run, backbone, items, taps).is_file() or _kept(dataset, backbone, path, taps):
        return 0
    return sum(len(item.tokens) for item in items)


def states_of(backbone: Backbone, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Returns the hidden states [n, H * taps] of a conversation's tokens."""
    states: Tensor = backbone.engine.states(torch.tensor(tokens)[None], taps)[0]
    return states


def _kept(dataset: Dataset, backbone: Backbone, path: Path, taps: Sequence[int]) -> Dataset | None:
    """Returns the data set with the states that distillation stored next to the file; None if they do not fit.

    The states fit only if the model has no adapter, and has the weights and the quantization of the
    model that answered. Raises UserError if the rows belong to other data.
    """
    origin = describe_distillation(path.parent)
    stored = path.with_name("states.bin")
    answered_by = origin.backbone if isinstance(origin.backbone, dict) else {}
    fits = (
        backbone.adapter is None
        and same(answered_by, backbone.identity, *SHAPE, "weights")
        and origin.settings.get("rounding") == rounding(backbone)
    )
    layers = with_last_layer(origin.taps)
    items = _in_order(dataset)
    if not (
        fits
        and set(taps) <= set(layers)
        and stored.is_file()
        and all(item.state_rows for item in items)
    ):
        return None
    places = [item.state_rows or (0, 0) for item in items]
    size = backbone.hidden_size
    states = read_rows(stored, size * len(layers), 0, max(map(sum, places)))
    for item, (first, count) in zip(items, places, strict=True):
        if item.states_digest not in (None, states_digest(item, states[first : first + count])):
            fault = (
                f"{stored} holds other state rows than were kept for the conversation {item.id!r}"
            )
            raise UserError(fault, "delete it to compute the states again")
    columns = torch.cat([torch.arange(size) + size * layers.index(tap) for tap in taps])
    return replace(
        dataset, states=states, kept=True, columns=None if tuple(taps) == layers else columns
    )


def _in_order(dataset: Dataset) -> list[Conversation]:
    """Returns all conversations in the order of their states, which does not depend on the split."""
    return sorted((*dataset.train, *dataset.held_out), key=lambda item: item.id)


def _cache_path(
    run: Run, backbone: Backbone, items: Sequence[Conversation], taps: Sequence[int]
) -> Path:
    """Returns the file in which a run caches states; its name is a digest of everything on which they depend."""
    owner = {key: value for key, value in backbone.identity.items() if key != "id"}
    numbers = [rounding(backbone), str(backbone.dtype), backbone.engine.number_type]
    digest = hashlib.sha256(json.dumps([owner, *numbers, list(taps)]).encode())
    for item in items:
        digest.update(json.dumps(item.tokens).encode())
    return run.cache_dir / f"states-{digest.hexdigest()[:16]}.bin"


def _packs(
    backbone: Backbone, numbers: Sequence[int], conversations: Sequence[Conversation]
) -> list[list[int]]:
    """Divides conversations of similar length into packs, each of which the engine runs in one pass."""
    limit = PACK_TOKENS if backbone.engine.runs_packs else 0
    packs: list[list[int]] = []
    in_order = sorted(numbers, key=lambda i: len(conversations[i].tokens)) if limit else numbers
    for i in in_order:
        # All conversations in a pack are padded to the longest one, which is the last.
        if not packs or (len(packs[-1]) + 1) * len(conversations[i].tokens) > limit:
            packs.append([])
        packs[-1].append(i)
    return packs


def _prefill(
    path: Path,
    backbone: Backbone,
    conversations: Sequence[Conversation],
    starts: Sequence[int],
    taps: Sequence[int],
    world: Distributed,
    show: ShowProgress,
) -> None:
    """Computes the states of conversations and writes them to a file, in which conversation i begins at row starts[i].

    Every position except the last gets a row. The processes share the conversations and write to one file of the final
    size. With a sharded backbone, every process runs every conversation, and only the first process writes. A killed
    prefill resumes with the conversations whose last row is missing.
    """
    part = path.with_name(f"{path.name}.part")
    width = backbone.hidden_size * len(taps)
    with world.main_process_first():
        part.parent.mkdir(parents=True, exist_ok=True)
        store = StateStore(part, width)
        store.truncate(starts[-1])
    with closing(store):
        states = read_rows(part, width, 0, starts[-1])
        # The last value of a conversation is written last. While it is zero, the conversation is
        # not done.
        left = world.gather(
            [i for i in range(len(conversations)) if not states[starts[i + 1] - 1, -1]]
        )[0]
        own = left if world.sharded else world.strided_shard(left)
        count = 0
        total = sum(len(conversations[i].tokens) for i in own)
        if total:
            log.info(f"computing the hidden states of the data, once: {total:,} tokens to run")
        for pack in _packs(backbone, own, conversations):
            texts = [torch.tensor(conversations[i].tokens) for i in pack]
            padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
            hidden = backbone.engine.states(upload(padded, backbone.device), taps).cpu()
            for i, text, states in zip(pack, texts, hidden, strict=True):
                if world.first or not world.sharded:
                    store.write(states[: len(text) - 1], starts[i])
                count += len(text)
            show("hidden states", count, total)
        store.sync()
    world.wait()
    # The part is missing if another training run has computed the same states.
    with world.main_process_first(), suppress(FileNotFoundError):
        if world.first:
            part.replace(path)
