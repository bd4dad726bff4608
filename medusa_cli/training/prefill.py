"""The hidden states of answers: the rows kept while distilling, else one prefill, cached in the run."""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from medusa_cli.backbone import Backbone
from medusa_cli.backbone.identity import rounding_of
from medusa_cli.drafters.base import beside_final
from medusa_cli.engines import Plan
from medusa_cli.engines.kernels import BITS
from medusa_cli.errors import UserError
from medusa_cli.runs.made import describe_distillation
from medusa_cli.runs.run import Run, check_backbone
from medusa_cli.states import read_rows, seal
from medusa_cli.training.begun import begun, join, part_of
from medusa_cli.training.data import Dataset, held_out_ids, learnable, records_digest, split
from medusa_cli.training.distributed import World
from medusa_cli.training.parsing import Record, read_records


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
    together: World | None = None,
    sharded: bool = False,
    needed: Callable[[list[str], set[str]], Collection[str]] | None = None,
) -> Dataset:
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
    records, report = read_records(path, backbone)
    usable = learnable(records)
    held = held_out_ids(usable, fraction)
    digest = records_digest(records, held)
    stored = path.parent / run.states_path.name
    # States kept while distilling are those of the model without an adapter, rounded as it was then.
    made = describe_distillation(path.parent)
    kept, size = beside_final(made.taps), backbone.hidden_size
    known = backbone.adapter is None and set(taps) <= set(kept) and stored.is_file()
    known = known and made.settings.get("rounding") == rounding(backbone)
    if known and all(record.first_row is not None and record.whole >= prompts for record in records):
        rows = max((record.first_row or 0) + record.rows for record in records)
        states = _stored(stored, rows, size * len(kept), backbone)
        _check_seals(records, states, stored)
        found = replace(split(records, states, report, held, digest, prompts), kept=True)
        if tuple(taps) != kept:
            found.columns = torch.cat([torch.arange(size) + size * kept.index(tap) for tap in taps])
        return found
    # The rows the records name are elsewhere or of another layer: the file made here has them in order.
    records = [Record(one.id, one.tokens, one.spans, None, whole=prompts) for one in records]
    cached = _cached(run, backbone, records, taps)
    if needed is not None and not cached.is_file():
        chosen = set(needed([one.id for one in usable], held))
        records = [one for one in records if one.id in chosen]
        if not records:
            return split(records, torch.empty(0, size * len(taps)), report, held, digest, prompts)
        cached = _cached(run, backbone, records, taps)
    together = together or World()
    if not together.gather(cached.is_file())[0]:  # all as the first one sees it
        _compute(cached, backbone, records, taps, together, sharded, on_total, on_progress)
    states = _stored(cached, sum(one.rows for one in records), size * len(taps), backbone, exact=True)
    return split(records, states, report, held, digest, prompts)


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


def _check_seals(records: Sequence[Record], states: Tensor, path: Path) -> None:
    """UserError where state rows are not those that were kept for their conversation; older files have no seal."""
    broken = []
    for one in records:
        rows = states[one.first_row or 0 :][: one.rows]
        if one.seal is not None and one.seal != seal(one.id, one.tokens, one.spans, rows):
            broken.append(one.id)
    if broken:
        raise UserError(
            f"{path} holds other state rows than were kept for {len(broken):,} of {len(records):,} conversations, "
            f"the first of them {broken[0]!r}",
            "delete it to compute the states again",
        )


def _cached(run: Run, backbone: Backbone, records: Sequence[Record], taps: Sequence[int]) -> Path:
    """Where a run keeps the states that are computed of some conversations, by what they hang on."""
    # What the run is bound to by `weights` it need not be told by again: states kept from before that are found, and
    # so are those from before rounding was named, where there is none.
    owner = {key: value for key, value in backbone.identity.items() if key not in ("id", "weights", "rounding")}
    named = [owner, str(backbone.dtype), list(taps)]
    rounded = rounding(backbone)
    if rounded is not None:  # bitsandbytes' as earlier versions named it, whose states are found again
        named.append(rounded if rounded in BITS else f"load_in_{rounded}")
    named += ["prompts"] if any(record.whole for record in records) else []
    digest = hashlib.sha256(json.dumps(named).encode())
    for record in records:
        digest.update(json.dumps([record.tokens, record.spans]).encode())
    return run.cache_dir / f"states-{digest.hexdigest()[:16]}.bin"


def rounding(backbone: Backbone) -> str | None:
    """How a backbone's weights are rounded, by its engine ("int8") or at load ("4bit"); None where they are not."""
    kernel = backbone.engine.kernel.name
    return kernel if kernel in BITS else rounding_of(backbone.model)


def _compute(
    path: Path,
    backbone: Backbone,
    records: Sequence[Record],
    taps: Sequence[int],
    together: World,
    sharded: bool,
    on_total: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> None:
    """Make the file of conversations' states: each process a part, or, of a sharded backbone, the first one all."""
    shared = together.size > 1 and not sharded
    rank, size = (together.rank, together.size) if shared else (0, 1)
    mine = together.stretch(records) if shared else records
    part = part_of(path, rank, size) if shared or together.first else None
    _prefill(backbone, mine, taps, part, together if sharded else World(), on_total, on_progress)
    together.wait()
    if together.first:
        join(path, size)
    together.wait()


def _prefill(
    backbone: Backbone,
    records: Sequence[Record],
    taps: Sequence[int],
    path: Path | None,
    together: World,
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
            store, there = stack.enter_context(begun(path, width, [one.rows for one in records]))
        left = records[together.gather(there)[0] :]
        if left:
            on_total(sum(len(record.tokens) for record in left))
        for record in left:
            cache = backbone.engine.new_cache(capacity=len(record.tokens))
            plan = Plan.chain(record.tokens, taps=taps, logits="none")
            hidden = backbone.engine.forward(plan, cache).hidden[0]
            if store is not None:
                spans = [(1, len(record.tokens))] if record.whole else record.spans
                store.append(torch.cat([hidden[start - 1 : end - 1] for start, end in spans]))
            on_progress(len(record.tokens))
