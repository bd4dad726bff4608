"""From a choice to what decodes: a backbone, a drafter and the trees it drafts over, found to fit together."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_cli.backbone import Backbone
from medusa_cli.decoding.costs import costs_for, fortunes_for
from medusa_cli.decoding.decoder import captured_over, looks_up
from medusa_cli.decoding.lookup import UNMEASURED, Lookup
from medusa_cli.decoding.pace import Pace, Size
from medusa_cli.decoding.trial import captures
from medusa_cli.drafters import Drafter, load_drafter
from medusa_cli.engines import load_backbone
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.accuracies import STAMP, UNKNOWN, Heads, outdated, read_calibration, stamp_of
from medusa_cli.runs.resolve import Choice
from medusa_cli.tree import Growth, Tree
from medusa_cli.tree.budget import budgets
from medusa_cli.tree.saved import load_tree, tree_made
from medusa_cli.tree.search import largest, search

MOST_PAYING = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled:
    """What decodes: the backbone, and, unless decoding is plain, the drafter, if any, and what is drafted over."""

    backbone: Backbone
    drafter: Drafter | None = None
    shape: "Tree | Growth | Pace | Lookup | None" = None

    @property
    def words(self) -> str:
        """Number type, engine and tree in one line."""
        backbone = self.backbone
        kind = str(backbone.dtype).removeprefix("torch.")
        place = f"{backbone.id} in {kind} on {backbone.device}, {backbone.engine.title}"
        if self.drafter is None:
            return f"{place}, plain decoding" if self.shape is None else f"{place}, drafts looked up in the text"
        return f"{place}, {self.drafter.name} drafter, {describe(self.shape)}"


def assemble(
    choice: Choice,
    *,
    device: str = "auto",
    dtype: str = "auto",
    engine: str = "auto",
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    trust_remote_code: bool = False,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Assembled:
    """Load what was chosen; UserError where drafter, tree and model do not fit.

    on_progress is told of steps that are timed where the tree auto meets a drafter for the first time on this machine.
    """
    tree = static_tree(choice)
    backbone = load_backbone(
        choice.model,
        device=device,
        dtype=dtype,
        engine=engine,
        load_in_4bit=load_in_4bit,
        load_in_8bit=load_in_8bit,
        trust_remote_code=trust_remote_code,
        adapter=choice.adapter,
        chat_template=choice.run.chat_template if choice.run else None,
    )
    if choice.run is not None:
        choice.run.bind(backbone.identity)
    if choice.drafter is None:
        return Assembled(backbone, shape=looked_up(backbone, on_progress) if choice.lookup else None)
    drafter, shape = load_drafting(choice, backbone, tree, on_progress)
    return Assembled(backbone, drafter, shape)


def static_tree(choice: Choice) -> Tree | None:
    """The chosen static tree, read or searched; None where no drafter was chosen.

    Warns where it was made for another drafter.
    """
    if choice.drafter is None or (choice.auto and choice.calibration is not None and choice.calibration.is_file()):
        return None  # plain decoding, or trees of sizes that the calibration will tell
    if choice.static is not None and choice.calibration is not None:
        accuracies = _calibration(choice).accuracies
        if choice.static > largest(accuracies):
            there = f"these heads allow 1 to {largest(accuracies):,} nodes, the root included"
            raise UsageError(f"@tree static:{choice.static} cannot be", there)
        return search(accuracies, choice.static)
    if choice.tree is None:  # dynamic trees of a number of nodes, or sizes to be found
        return None if choice.auto else Tree.root_only()
    if outdated(_made(choice.tree).get(STAMP), choice.drafter):
        log.warning(
            f"the tree {choice.tree} was made for another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` and `medusa tree` make one that fits"
        )
    return load_tree(choice.tree)


def _made(tree: Path) -> dict[str, Any]:
    """What a tree's file says of its making."""
    return vars(tree_made(tree))


def _calibration(choice: Choice) -> Heads:
    """What was measured of the heads, if anything; warns where it was measured on another drafter."""
    if choice.calibration is None or choice.drafter is None or not choice.calibration.is_file():
        return UNKNOWN
    found = read_calibration(choice.calibration)
    if outdated(found.drafter, choice.drafter):
        log.warning(
            f"{choice.calibration} was measured on another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` measures this one"
        )
    return found


def load_drafting(
    choice: Choice,
    backbone: Backbone,
    tree: Tree | None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> "tuple[Drafter, Tree | Growth | Pace | Lookup]":
    """The chosen drafter and what it drafts over; UserError where they do not fit."""
    assert choice.drafter is not None
    drafter = load_drafter(choice.drafter, backbone)
    if tree is not None:
        check_fit(tree, drafter, str(choice.tree or f"static:{choice.static}"))
    shape: Tree | Growth | Pace
    if choice.auto:
        shape = pace_of(choice, backbone, drafter, tree, on_progress)
    else:
        assert tree is not None
        shape = tree if choice.dynamic is None else growth_of(choice, tree, drafter)
    return drafter, with_lookup(choice, shape, backbone, drafter)


def with_lookup(
    choice: Choice, shape: "Tree | Growth | Pace", backbone: Backbone, drafter: Drafter
) -> "Tree | Growth | Pace | Lookup":
    """A shape, with what the text itself suggests beside it where that was chosen and can be; warns where it cannot."""
    if not choice.lookup:
        return shape
    if not looks_up(drafter, captured_over(backbone.engine, shape)):
        if choice.lookup_named:
            log.warning("nothing is looked up in the text beside a %s drafter here: @lookup is left out", drafter.name)
        return shape
    known = choice.calibration is not None and choice.calibration.is_file() and isinstance(shape, Tree)
    return Lookup(shape, read_calibration(choice.calibration).accuracies if known and choice.calibration else ())


def looked_up(backbone: Backbone, on_progress: Callable[[int], None] = lambda steps: None) -> Lookup:
    """What is drafted without a drafter: what the text itself suggests, as far as that pays on this machine.

    UsageError where nothing is looked up.
    """
    if not looks_up(None, captures(backbone.engine)):
        raise UsageError(
            f"nothing is looked up in the text where steps are captured, as on {backbone.device}",
            "leave out @lookup and the method lookup",
        )
    return Lookup(Pace([], costs_for(backbone, None, None, on_progress=on_progress)))


def pace_of(
    choice: Choice,
    backbone: Backbone,
    drafter: Drafter,
    tree: Tree | None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Pace:
    """The trees of several sizes that suit this machine, by the calibration; without one the run's tree, or none."""
    assert choice.drafter is not None
    stamp = stamp_of(choice.drafter)
    costs = costs_for(backbone, drafter, stamp, on_progress=on_progress)
    fortunes = fortunes_for(backbone, drafter, stamp)
    accuracies = _calibration(choice).accuracies[: drafter.num_heads]
    if accuracies:
        known = len(getattr(drafter, "draft_ids", ())) or None
        return Pace.of(budgets([row[:known] for row in accuracies], costs), costs, fortunes)
    assert tree is not None
    return Pace([Size(tree, 1 + UNMEASURED * tree.max_depth)], costs, fortunes)


def growth_of(choice: Choice, tree: "Tree | Growth | Pace | Lookup", drafter: Drafter) -> Growth:
    """Dynamic trees of as many nodes as were asked for, or as the static tree has, at the calibrated temperatures.

    Where `tree --budget auto` made the static tree, it knows from which chance on a node pays on this machine: then
    that alone decides, up to MOST_PAYING nodes.
    """
    least = _made(choice.tree).get("break_even", 0.0) if choice.tree else 0.0
    over = tree.over if isinstance(tree, Lookup) else tree
    nodes = over.most if isinstance(over, Pace) else over.size
    budget = choice.dynamic or (max(MOST_PAYING, nodes) if least else nodes)
    return Growth(budget, drafter.num_heads, _calibration(choice).temperatures, least)


def describe(shape: "Tree | Growth | Pace | Lookup | None") -> str:
    """What is drafted over in a few words."""
    if shape is None:
        return "no tree"
    if isinstance(shape, Lookup):
        return f"{describe(shape.over)}, and what the text repeats"
    if isinstance(shape, Pace):
        return (
            f"trees of a size that pays, {shape.size} nodes to begin with"
            if shape.size > 1
            else "drafts where they pay"
        )
    return (
        f"dynamic trees of at most {shape.size} nodes" if isinstance(shape, Growth) else f"tree of {shape.size} nodes"
    )


def check_fit(tree: Tree, drafter: Any, name: str) -> None:
    """UserError for a tree (a file, or what names one) that asks for more heads or guesses than the drafter has."""
    if tree.max_depth > drafter.num_heads:
        raise UserError(
            f"the tree {name} is {tree.max_depth} deep, the drafter has {drafter.num_heads} heads",
            f"make a tree with `medusa tree --heads {drafter.num_heads}`, or give another @tree",
        )
    vocabulary = len(getattr(drafter, "draft_ids", ())) or None
    if vocabulary is not None and max(tree.widths, default=0) > vocabulary:
        raise UserError(
            f"the tree {name} uses guess {max(tree.widths)}, the heads know {vocabulary} tokens", "use a narrower tree"
        )
