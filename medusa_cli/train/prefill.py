"""The hidden states to learn from: kept by `medusa distill`, cached in the run, or computed once by a prefill."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch

from medusa_cli.data.conversation import Conversation
from medusa_cli.data.packing import Dataset
from medusa_cli.data.states import StateStore, read_rows, seal
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.engine import Plan
from medusa_cli.engine.kernels import BITS
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.distributed import Distributed
from medusa_cli.model.identity import rounding_of
from medusa_cli.runs.run import Run, check_backbone, describe_distillation

log = logging.getLogger(__name__)


def rounding(backbone: Backbone) -> str | None:
    """Returns how a backbone's weights are quantized, by its engine or at load; None where they are not."""
    kernel = backbone.engine.kernel.name
    return kernel if kernel in BITS else rounding_of(backbone.model)


def with_states(
    dataset: Dataset,
    run: Run,
    backbone: Backbone,
    path: Path,
    taps: Sequence[int] = (-1,),
    *,
    among: Dataset | None = None,
    world: Distributed | None = None,
    show: Callable[..., None] = lambda *progress: None,
) -> Dataset:
    """Returns the data set of the file `path` with its states: kept while distilling, cached in the run, or computed.

    among: a larger data set, whose states serve if they are cached. world: the processes that share the computation.
    show: called with a name, the tokens done and their number. Raises UserError for states of other data.
    """
    world, owner = world or Distributed(), Run(path.parent).owner
    if owner is not None:
        check_backbone(owner, backbone.identity, f"{path}")
    if kept := _kept(dataset, backbone, path, taps):
        return kept
    needed = _in_order(among or dataset)
    cached = _cache_path(run, backbone, needed, taps)
    if among is not None and not cached.is_file():
        needed = _in_order(dataset)
        cached = _cache_path(run, backbone, needed, taps)
    if not world.gather(cached.is_file())[0]:  # all as the first one sees it
        _prefill(cached, backbone, needed, taps, world, show)
    ends = list(accumulate(len(item.tokens) - 1 for item in needed))
    rows = {item.id: (end - len(item.tokens) + 1, len(item.tokens) - 1) for item, end in zip(needed, ends, strict=True)}
    train, held_out = (
        [replace(item, state_rows=rows[item.id], seal=None) for item in part]
        for part in (dataset.train, dataset.held_out)
    )
    states = read_rows(cached, backbone.hidden_size * len(taps), 0, ends[-1])
    return replace(dataset, train=train, held_out=held_out, states=states)


def _kept(dataset: Dataset, backbone: Backbone, path: Path, taps: Sequence[int]) -> Dataset | None:
    """Returns the data set with the states that distilling kept beside the file; None if they do not serve here.

    They are those of the model without an adapter, quantized as it was then. Raises UserError for rows of other data.
    """
    origin, stored = describe_distillation(path.parent), path.with_name("states.bin")
    fits = backbone.adapter is None and origin.settings.get("rounding") == rounding(backbone)
    layers, items = with_last_layer(origin.taps), _in_order(dataset)
    if not (fits and set(taps) <= set(layers) and stored.is_file() and all(item.state_rows for item in items)):
        return None
    places = [item.state_rows or (0, 0) for item in items]
    size = backbone.hidden_size
    states = read_rows(stored, size * len(layers), 0, max(map(sum, places)))
    for item, (first, count) in zip(items, places, strict=True):
        if item.seal not in (None, seal(item, states[first : first + count])):
            raise UserError(
                f"{stored} holds other state rows than were kept for the conversation {item.id!r}",
                "delete it to compute the states again",
            )
    columns = torch.cat([torch.arange(size) + size * layers.index(tap) for tap in taps])
    return replace(dataset, states=states, kept=True, columns=None if tuple(taps) == layers else columns)


def _in_order(dataset: Dataset) -> list[Conversation]:
    """Returns all conversations in the order of their states, which does not depend on the split."""
    return sorted((*dataset.train, *dataset.held_out), key=lambda item: item.id)


def _cache_path(run: Run, backbone: Backbone, items: Sequence[Conversation], taps: Sequence[int]) -> Path:
    """Returns where a run keeps the states of conversations: the name is a digest of all that they depend on."""
    owner = {key: value for key, value in backbone.identity.items() if key not in ("id", "weights")}
    digest = hashlib.sha256(json.dumps([owner, rounding(backbone), str(backbone.dtype), list(taps)]).encode())
    for item in items:
        digest.update(json.dumps(item.tokens).encode())
    return run.cache_dir / f"states-{digest.hexdigest()[:16]}.bin"


def _prefill(
    path: Path,
    backbone: Backbone,
    conversations: Sequence[Conversation],
    taps: Sequence[int],
    world: Distributed,
    show: Callable[..., None],
) -> None:
    """Computes the states of conversations, all positions but the last: each process a part of the file.

    A backbone that is sharded over the processes runs in all of them at once, and the first one writes. A killed
    prefill resumes with the first conversation that is not whole in its part.
    """
    shared = world.size > 1 and not world.sharded
    own = world.contiguous_shard(conversations) if shared else list(conversations)
    part = partial_path(path, *((world.rank, world.size) if shared else (0, 1)))
    with ExitStack() as stack:
        store, done = None, 0
        if shared or world.first:
            store = stack.enter_context(closing(_open_part(part, backbone.hidden_size * len(taps))))
            done = drop_torn(store, [len(conversation.tokens) - 1 for conversation in own])
        if world.sharded:
            done = world.gather(done)[0]
        count, total = 0, sum(len(conversation.tokens) for conversation in own[done:])
        if total:
            log.info(f"computing the hidden states of the data, once: {total:,} tokens to run")
        for conversation in own[done:]:
            cache = backbone.engine.new_cache(capacity=len(conversation.tokens))
            plan = Plan.chain(conversation.tokens, taps=taps, logits="none")
            hidden = backbone.engine.forward(plan, cache).hidden[0]
            if store is not None:
                store.append(hidden[:-1])
            count += len(conversation.tokens)
            show("hidden states", count, total)
        if store is not None:
            store.sync()
        world.wait()
        if world.first:
            merge_partial(path, world.size if shared else 1)
        world.wait()


def partial_path(path: Path, rank: int = 0, size: int = 1) -> Path:
    """Returns where one of `size` processes writes its part of a file of states."""
    return path.with_name(f"{path.name}.part-{rank}-of-{size}")


def _open_part(part: Path, width: int) -> StateStore:
    """Opens a part to append to; raises UserError while another process writes it."""
    part.parent.mkdir(parents=True, exist_ok=True)
    store = StateStore(part, width)
    try:
        fcntl.flock(store.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as reason:
        raise UserError(f"another process computes the states of {part.parent}", "wait until it has ended") from reason
    except OSError:  # a file system without locks
        pass
    return store


def drop_torn(store: StateStore, rows: Sequence[int]) -> int:
    """Cuts a part to whole conversations, of `rows` rows each; returns how many of them it holds."""
    ends = [0, *accumulate(rows)]
    done = bisect_right(ends, store.rows) - 1
    store.truncate(ends[done])
    return done


def merge_partial(path: Path, size: int) -> None:
    """Makes one file of the parts of `size` processes, and removes what other numbers of processes left.

    Killed on the way, it leaves a first part that is too long, which the next prefill cuts.
    """
    first = partial_path(path, 0, size)
    with first.open("ab") as out:
        for rank in range(1, size):
            with partial_path(path, rank, size).open("rb") as part:
                shutil.copyfileobj(part, out)
        out.flush()
        os.fsync(out.fileno())
    first.replace(path)
    for left in path.parent.glob(f"{path.name}.*"):
        left.unlink()
