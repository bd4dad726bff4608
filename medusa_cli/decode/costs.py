"""What whole steps cost on this machine: timed once for a drafter on a backbone, by the very loop that decodes."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_cli.assets import home
from medusa_cli.decode.decoder import Decoder
from medusa_cli.decode.sequence import Request
from medusa_cli.decode.stats import Step
from medusa_cli.drafters.base import Draft, Drafter
from medusa_cli.engine.autotune import machine_key
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.runs.io import convert, read_object, write_json
from medusa_cli.tree.search import Costs
from medusa_cli.tree.tree import Tree

CONTEXT = 256
ROUNDS = 4
# Products go by blocks of rows, so that the cost rises in steps: small sizes are timed one by one.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 48, 64)
# Sizes beyond one that costs so many plain steps are not worth the time it takes to time them.
HOPELESS = 6.0
UNUSABLE = "%s cannot be used; steps are timed anew (%s)"
# How deep the trees are that stand for drafts from elsewhere, and the stamp by which such costs are kept.
ELSEWHERE, WITHOUT = 4, "no drafter"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredCosts:
    """Stores the seconds of a step by nodes of its tree, and of drafting by levels."""

    verify: dict[str, float]
    draft: dict[str, float]

    def __post_init__(self) -> None:
        if "1" not in self.verify or (self.draft and "1" not in self.draft):  # without a drafter there are no levels
            raise ValueError("a plain step or a first level is missing")
        if not all(0 < one < 1e4 for one in (*self.verify.values(), *self.draft.values())):
            raise ValueError("a time is not positive")
        if not all(0 < int(size) <= SIZES[-1] for size in (*self.verify, *self.draft)):
            raise ValueError("a size is out of range")

    def costs(self) -> Costs:
        return Costs(*({int(size): one for size, one in part.items()} for part in (self.verify, self.draft)))


def measure_costs(
    backbone: Backbone,
    drafter: Drafter | None,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    sizes: Sequence[int] = SIZES,
    cuda_graphs: bool | None = None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Costs:
    """Time steps over trees of so many nodes, and drafts so many levels deep, after `context` tokens; least of rounds.

    Whatever else a machine does only ever adds, so the least time is the step's own. Tokens are arbitrary: a step's
    time does not depend on them. Without a drafter, passes over drafts that come from elsewhere are timed.
    """
    rides = drafter is not None and drafter.uses_verify_pass
    heads = drafter.num_heads if drafter is not None else 0
    steps = (1 + rides) * (len(sizes) + heads)
    context = max(1, min(context, backbone.max_positions - (max(heads, ELSEWHERE) + 1) * (steps + 1)))
    prompt = (torch.arange(context) % backbone.vocab_size).tolist()
    decoder = Decoder(backbone, drafter, Tree.root_only(), cuda_graphs=cuda_graphs)
    depths = {depth: Tree.chain(depth) for depth in range(1, heads + 1)}
    known = len(getattr(drafter, "draft_ids", ())) or backbone.vocab_size  # no head has more guesses
    bushy = {nodes: _bushy(nodes, heads or ELSEWHERE) for nodes in sizes if nodes <= known}
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}

    def step(tree: Tree) -> Step:
        decoder.use_tree(tree)
        if rides:
            decoder.step()
        made = [Draft(torch.zeros(tree.size, dtype=torch.long, device=backbone.device), tree)]
        found = decoder.step(made if drafter is None else None)[0][1]
        on_progress(1)
        return found

    for number in range(rounds + 1):
        # The prompt is still there from the round before: only its last token is run again.
        sequence, _ = decoder.admit(Request(prompt, backbone.max_positions, stop_ids=()))
        for depth, tree in depths.items():
            seconds = step(tree).draft_s
            if number:  # the first round warms up
                draft[depth] = min(seconds, draft.get(depth, seconds))
        for nodes, tree in list(bushy.items()):
            seconds = step(tree).verify_s
            if number:
                verify[nodes] = min(seconds, verify.get(nodes, seconds))
                if nodes > 16 and seconds > HOPELESS * verify[1]:
                    for larger in [size for size in bushy if size > nodes]:
                        del bushy[larger]
                    break
        decoder.cancel(sequence)
    return Costs(verify, draft)


def costs_for(
    backbone: Backbone,
    drafter: Drafter | None,
    stamp: str | None,
    *,
    again: bool = False,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Costs:
    """The kept costs of a drafter (by its stamp) on a backbone on this machine, or new ones, which are kept.

    Without a drafter, those of the backbone's passes alone.
    """
    stamp = stamp if drafter is not None else WITHOUT
    facts, key = _entry(backbone, drafter, stamp)
    kept = _read()
    if not again and stamp is not None and key in kept:
        try:
            found = convert(kept[key], StoredCosts, f"the step times {_path()}").costs()
            if found.draft or drafter is None:
                return found
            log.warning(UNUSABLE, _path(), "a first level is missing")
        except UserError as reason:
            log.warning(UNUSABLE, _path(), str(reason).split(";")[0])
    log.info("timing decoding steps on this machine, once for this drafter")
    found = measure_costs(backbone, drafter, on_progress=on_progress)
    if stamp is not None:
        try:
            write_json(_path(), {**kept, key: {"facts": facts, "verify": found.verify, "draft": found.draft}})
        except OSError as reason:
            log.warning("the step times cannot be kept: %s", reason.strerror)
    return found


def _path() -> Path:
    return home() / "steps.json"


def _entry(backbone: Backbone, drafter: Drafter | None, stamp: str | None) -> tuple[list[str], str]:
    """What step times hang on, and the name they are kept by."""
    facts = [machine_key(backbone.config), str(backbone.device), backbone.engine.title, str(backbone.dtype)]
    facts += [drafter.name, str(drafter.num_heads)] if drafter is not None else []
    facts.append(stamp or "")
    return facts, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read() -> dict[str, Any]:
    """All that is kept; nothing where there is no file, or none that can be used."""
    if not _path().is_file():
        return {}
    try:
        return read_object(_path(), "the step times")
    except UserError as reason:
        log.warning(UNUSABLE, _path(), str(reason).split(";")[0])
        return {}


def _bushy(nodes: int, depth: int) -> Tree:
    """Any tree of so many nodes: one path as deep as the heads go, and guesses side by side below the root."""
    chain = [[0] * level for level in range(1, min(depth, nodes - 1) + 1)]
    return Tree.from_choices([*chain, *([rank] for rank in range(1, nodes - len(chain)))])
