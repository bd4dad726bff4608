"""State rows that a prefill is making: appended as they come, and gone on with where a killed one stopped."""

import fcntl
import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.data.conversation import Conversation, read_conversations
from medusa_cli.data.packing import Dataset, Example, digest_of, held_out_ids, learnable, split_answers
from medusa_cli.data.states import StateStore, read_rows, seal
from medusa_cli.drafters.base import with_last_layer
from medusa_cli.engine import Plan
from medusa_cli.engine.kernels import BITS
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.identity import rounding_of
from medusa_cli.runs.io import check_regular
from medusa_cli.runs.provenance import describe_distillation
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.train.distributed import Distributed


def partial_path(path: Path, rank: int = 0, size: int = 1) -> Path:
    """Where one of so many processes writes its part of a file of states, until that is whole."""
    return path.with_name(f"{path.name}.part-{rank}-of-{size}")


def _whole_of(part: Path) -> Path:
    """The file of states that a part becomes one of."""
    return part.with_suffix("")


@contextmanager
def partial_states(part: Path, width: int, rows: Sequence[int]) -> Iterator[tuple[StateStore | None, int]]:
    """A part to append to, for conversations of so many rows each, and how many of these it holds already.

    What a killed prefill wrote of one more is dropped. Another process that writes the same part is waited for: where
    it has made the whole of it, there is nothing left to append, and no part.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with _locked(part):
        if _whole_of(part).is_file():
            part.unlink()
            yield None, len(rows)
            return
        with closing(StateStore(part, width)) as store:
            ends = [0, *accumulate(rows)]
            there = bisect_right(ends, store.rows) - 1
            store.truncate(ends[there])
            yield store, there
            store.sync()


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Be the only one to hold the part that lies there, made empty where there is none."""
    check_regular(part)
    while True:
        with part.open("ab") as held:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if _lies_at(part, held.fileno()):  # else whoever was waited for has moved or removed it
                yield
                return


def _lies_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one of a name still."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def merge_partial(path: Path, size: int) -> None:
    """Make one file of the parts of so many processes, and remove what other numbers of processes left.

    Killed on the way, it leaves a first part that is too long, which `partial_states` cuts.
    """
    first = partial_path(path, 0, size)
    if first.is_file():  # else another process was waited for, which has ended the work
        with first.open("ab") as out:
            for rank in range(1, size):
                with partial_path(path, rank, size).open("rb") as part:
                    shutil.copyfileobj(part, out)
            out.flush()
            os.fsync(out.fileno())
        first.replace(path)
    for left in path.parent.glob(f"{path.name}.*"):
        left.unlink()


def load_dataset(
    run: Run,
    backbone: Backbone,
    *,
    data: Path | None = None,
    fraction: float = 0.05,
    taps: Sequence[int] = (-1,),
    prompts: bool = False,
    on_total: Callable[[int], None] = lambda tokens: None,
    on_progress: Callable[[int], None] = lambda tokens: None,
    together: Distributed | None = None,
    sharded: bool = False,
    needed: Callable[[list[str], set[str]], Collection[str]] | None = None,
) -> Dataset[Example]:
    """The run's distilled conversations (or those of the file `data`) with their states, split by record id.

    prompts: those of prompts too, for a drafter whose layers see the whole conversation; states kept of answers alone
    are then computed again. on_total is told how many tokens this process must prefill, if any, on_progress how many it
    did. together: the processes that share the conversations, or, where the backbone is sharded among them, make all
    passes side by side. needed: of which conversations, of all that can be learnt from and of those held out, there are
    to be states (None: of all); others are left out where states must be computed. UserError for missing or unusable
    data and for states that do not belong to it.
    """
    path = data or run.data_path
    _check_owner(path, backbone)
    records, report = read_conversations(path, backbone)
    usable = learnable(records)
    held = held_out_ids([record.id for record in usable], fraction)
    digest = digest_of(records, held)
    stored = path.parent / run.states_path.name
    # States kept while distilling are those of the model without an adapter, rounded as it was then.
    made = describe_distillation(path.parent)
    kept, size = with_last_layer(made.taps), backbone.hidden_size
    known = backbone.adapter is None and set(taps) <= set(kept) and stored.is_file()
    known = known and made.settings.get("rounding") == rounding(backbone)
    if known and all(record.state_rows and record.has_all_rows >= prompts for record in records):
        rows = max(sum(record.state_rows) for record in records if record.state_rows)
        states = _stored(stored, rows, size * len(kept), backbone)
        _check_seals(records, states, stored)
        found = replace(split_answers(records, states, report, held, digest, prompts), kept=True)
        if tuple(taps) != kept:
            found.columns = torch.cat([torch.arange(size) + size * kept.index(tap) for tap in taps])
        return found
    cached = _cached(run, backbone, records, taps, prompts)
    if needed is not None and not cached.is_file():
        chosen = set(needed([one.id for one in usable], held))
        records = [one for one in records if one.id in chosen]
        if not records:
            return split_answers([], torch.empty(0, size * len(taps)), report, held, digest, prompts)
        cached = _cached(run, backbone, records, taps, prompts)
    records = _in_order(records, prompts)
    together = together or Distributed()
    if not together.gather(cached.is_file())[0]:  # all as the first one sees it
        _compute(cached, backbone, records, taps, together, sharded, on_total, on_progress)
    states = _stored(cached, sum(map(_rows, records)), size * len(taps), backbone, exact=True)
    return split_answers(records, states, report, held, digest, prompts)


def _in_order(records: Sequence[Conversation], prompts: bool) -> list[Conversation]:
    """Returns the conversations with the rows of a file made here, where they follow one another."""
    counts = [len(record.tokens) - 1 if prompts else record.positions for record in records]
    starts = accumulate(counts, initial=0)
    return [
        replace(record, state_rows=(start, count), seal=None)
        for record, start, count in zip(records, starts, counts, strict=False)
    ]


def _rows(record: Conversation) -> int:
    """Returns the number of a conversation's state rows."""
    return record.state_rows[1] if record.state_rows else 0


def _check_owner(path: Path, backbone: Backbone) -> None:
    """Refuse data whose run directory says that another backbone made it."""
    owner = Run(path.parent).owner
    if path.is_file() and owner is not None:
        check_backbone(owner, backbone.identity, f"{path}")


def _stored(path: Path, rows: int, width: int, backbone: Backbone, exact: bool = False) -> Tensor:
    size = path.stat().st_size
    if size < rows * width * 2 or (exact and size != rows * width * 2) or size == 0:
        raise UserError(
            f"{path} ({size:,} bytes) does not hold the {rows:,} state rows of width {width} that its data "
            f"names for the model {backbone.id!r}",
            "delete it to compute the states again" if exact else "distil again into a fresh @run",
        )
    return read_rows(path, width, 0, rows)


def _check_seals(records: Sequence[Conversation], states: Tensor, path: Path) -> None:
    """UserError where state rows are not those that were kept for their conversation; older files have no seal."""
    broken = []
    for one in records:
        first, count = one.state_rows or (0, 0)
        if one.seal is not None and one.seal != seal(one, states[first : first + count]):
            broken.append(one.id)
    if broken:
        raise UserError(
            f"{path} holds other state rows than were kept for {len(broken):,} of {len(records):,} conversations, "
            f"the first of them {broken[0]!r}",
            "delete it to compute the states again",
        )


def _cached(run: Run, backbone: Backbone, records: Sequence[Conversation], taps: Sequence[int], prompts: bool) -> Path:
    """Where a run keeps the states that are computed of some conversations, by what they hang on."""
    # What the run is bound to by `weights` it need not be told by again: states kept from before that are found, and
    # so are those from before rounding was named, where there is none.
    owner = {key: value for key, value in backbone.identity.items() if key not in ("id", "weights", "rounding")}
    named = [owner, str(backbone.dtype), list(taps)]
    rounded = rounding(backbone)
    if rounded is not None:
        named.append(rounded)
    named += ["prompts"] if prompts else []
    digest = hashlib.sha256(json.dumps(named).encode())
    for record in records:
        digest.update(json.dumps([record.tokens, record.spans]).encode())
    return run.cache_dir / f"states-{digest.hexdigest()[:16]}.bin"


def rounding(backbone: Backbone) -> str | None:
    """How a backbone's weights are rounded, by its engine ("int8") or at load ("bnb.nf4"); None where they are not."""
    kernel = backbone.engine.kernel.name
    return kernel if kernel in BITS else rounding_of(backbone.model)


def _compute(
    path: Path,
    backbone: Backbone,
    records: Sequence[Conversation],
    taps: Sequence[int],
    together: Distributed,
    sharded: bool,
    on_total: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> None:
    """Make the file of conversations' states: each process a part, or, of a sharded backbone, the first one all."""
    shared = together.size > 1 and not sharded
    rank, size = (together.rank, together.size) if shared else (0, 1)
    mine = together.contiguous_shard(records) if shared else records
    part = partial_path(path, rank, size) if shared or together.first else None
    _prefill(backbone, mine, taps, part, together if sharded else Distributed(), on_total, on_progress)
    together.wait()
    if together.first:
        merge_partial(path, size)
    together.wait()


def _prefill(
    backbone: Backbone,
    records: Sequence[Conversation],
    taps: Sequence[int],
    path: Path | None,
    together: Distributed,
    on_total: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> None:
    """Run each conversation once; append to a part, for every span [s, e), its states at s - 1 .. e - 2, all or none.

    Of records that are to have whole rows, those at every position but the last. Conversations that the part holds are
    passed over. path None: make the passes alone, for those who need them made. together: those who make them side by
    side.
    """
    with ExitStack() as stack:
        store, there = None, 0
        if path is not None:
            width = backbone.hidden_size * len(taps)
            store, there = stack.enter_context(partial_states(path, width, [_rows(one) for one in records]))
        left = records[together.gather(there)[0] :]
        if left:
            on_total(sum(len(record.tokens) for record in left))
        for record in left:
            cache = backbone.engine.new_cache(capacity=len(record.tokens))
            plan = Plan.chain(record.tokens, taps=taps, logits="none")
            hidden = backbone.engine.forward(plan, cache).hidden[0]
            if store is not None:
                spans = [(1, len(record.tokens))] if record.has_all_rows else record.spans
                store.append(torch.cat([hidden[start - 1 : end - 1] for start, end in spans]))
            on_progress(len(record.tokens))
