"""From --model, --run, --drafter and --tree to a backbone, a drafter and a tree that fit together."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_cli import console
from medusa_cli.assets import DEFAULT_MODEL
from medusa_cli.commands.heads import STAMP, UNKNOWN, Heads, outdated, read_calibration
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.files import read_json
from medusa_cli.runs.run import Run

if TYPE_CHECKING:
    from medusa_cli.backbone import Backbone
    from medusa_cli.decoding.sampling import Sampling
    from medusa_cli.drafters import Drafter
    from medusa_cli.tree import Growth, Tree


# A step verifies all nodes at once; far fewer than this pay anywhere.
MOST_GROWN = 256
MOST_PAYING = 32


@dataclass(frozen=True)
class Choice:
    """What was asked for, before anything heavy is loaded: the model's name, where drafter and tree lie, the run.

    dynamic: the nodes of a tree grown for every step, 0 for as many as the static tree has, None for the static one.
    static: the nodes of a tree searched from the calibration, None for the one in the file. adapter: what joint
    training added to the model. calibration: where the heads' accuracies and temperatures are, if anywhere.
    """

    model: str
    drafter: Path | None
    tree: Path | None
    run: Run | None
    dynamic: int | None = None
    calibration: Path | None = None
    adapter: Path | None = None
    static: int | None = None


def choose(
    model: str | None, run: str | None, drafter: Path | None, tree: str | None, *, need_drafter: bool = True
) -> Choice:
    """Explicit flags first, then the run, then what ships for the model; UserError where nothing is to be had."""
    target = Run.open(run) if run else None
    name = model or (target.model if target else None) or DEFAULT_MODEL
    file, static, dynamic = _tree_words(tree)
    if not need_drafter:
        return Choice(name, None, None, target, adapter=target.adapter if target else None)
    source = target or Run.pretrained(name)
    if drafter is not None and source is not None and drafter.resolve() == source.drafter_dir.resolve():
        drafter = None  # named, but what is taken in any case
    if drafter is not None and target is None:
        source = None  # tree and temperatures of the drafter that ships are no other drafter's
    folder = drafter or (source.drafter_dir if source else None)
    if folder is None:
        raise UserError(
            f"no drafter ships for the model {name!r}",
            f"train one with `medusa distill --model {name}` and `medusa train`, then give its --run",
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no drafter", "run `medusa train` first, or give another --drafter or --run")
    heat = source.calibration_path if source else None
    if static is not None and (heat is None or not heat.is_file()):
        remedy = "run `medusa calibrate` first" if source else "give the --run that it belongs to"
        raise UserError(f"--tree {tree}: {folder} is not calibrated", remedy)
    own = source.tree_path if source and source.tree_path.is_file() else None
    shape = None if static else file or own
    if shape is None and not (static or dynamic):  # a number of nodes needs no tree beside it
        remedy = f"make one with `medusa tree --run {run}`" if run else "give the --run that it belongs to"
        raise UserError(f"there is no tree for {folder}", f"{remedy}, or give --tree FILE")
    adapter = target.adapter if target and drafter is None else None
    return Choice(name, folder, shape, target, dynamic, heat, adapter, static)


def _tree_words(tree: str | None) -> tuple[Path | None, int | None, int | None]:
    """What --tree says: a file, nodes of a static tree to search, of dynamic ones; UserError for anything else."""
    word, colon, number = (tree or "static").partition(":")
    if word not in ("static", "dynamic"):
        if not Path(str(tree)).is_file():
            raise UserError(f"--tree {tree!r} is no file", "use static, static:N, dynamic, dynamic:N or a file")
        return Path(str(tree)), None, None
    if not colon:
        return None, None, None if word == "static" else 0
    if not number.isdigit() or not 1 <= int(number) <= MOST_GROWN:
        raise UsageError(f"--tree {tree!r}: {number!r} is no number of nodes", f"use 1 to {MOST_GROWN}")
    return None, *((int(number), None) if word == "static" else (None, int(number)))


def load(
    choice: Choice,
    *,
    device: str,
    dtype: str,
    engine: str = "auto",
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
) -> "tuple[Backbone, Drafter | None, Tree | Growth | None]":
    """Load what was chosen, saying in one line what it is; UserError where drafter, tree and model do not fit."""
    from medusa_cli.engines import load_backbone

    tree = static_tree(choice)
    backbone = load_backbone(
        choice.model,
        device=device,
        dtype=dtype,
        engine=engine,
        load_in_4bit=load_in_4bit,
        load_in_8bit=load_in_8bit,
        adapter=choice.adapter,
        chat_template=choice.run.chat_template if choice.run else None,
    )
    if choice.run is not None:
        choice.run.bind(backbone.identity)
    kind = str(backbone.dtype).removeprefix("torch.")
    if choice.drafter is None or tree is None:
        console.info(f"{choice.model} in {kind} on {backbone.device}, plain decoding")
        return backbone, None, None
    drafter, shape = load_drafting(choice, backbone, tree)
    what = f"{drafter.name} drafter {choice.drafter}, {describe(shape)}"
    console.info(f"{choice.model} in {kind} on {backbone.device}, {backbone.engine.title}, {what}")
    return backbone, drafter, shape


def static_tree(choice: Choice) -> "Tree | None":
    """The chosen static tree, read or searched; None where no drafter was chosen.

    Warns where it was made for another drafter.
    """
    from medusa_cli.tree import Tree
    from medusa_cli.tree.files import load_tree
    from medusa_cli.tree.search import largest, search

    if choice.drafter is None:
        return None
    if choice.static is not None and choice.calibration is not None:
        accuracies = _calibration(choice).accuracies
        if choice.static > largest(accuracies):
            there = f"these heads allow 1 to {largest(accuracies):,} nodes, the root included"
            raise UsageError(f"--tree static:{choice.static} cannot be", there)
        return search(accuracies, choice.static)
    if choice.tree is None:  # dynamic trees of a number of nodes
        return Tree.root_only()
    if outdated(_made(choice.tree).get(STAMP), choice.drafter):
        console.warn(
            f"the tree {choice.tree} was made for another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` and `medusa tree` make one that fits"
        )
    return load_tree(choice.tree)


def _made(tree: Path) -> dict[str, Any]:
    """What a tree's file says of its making."""
    data = read_json(tree, "the tree")
    made = data.get("provenance") if isinstance(data, dict) else None
    return made if isinstance(made, dict) else {}


def _calibration(choice: Choice) -> Heads:
    """What was measured of the heads, if anything; warns where it was measured on another drafter."""
    if choice.calibration is None or choice.drafter is None or not choice.calibration.is_file():
        return UNKNOWN
    found = read_calibration(choice.calibration)
    if outdated(found.drafter, choice.drafter):
        console.warn(
            f"{choice.calibration} was measured on another drafter than {choice.drafter}, perhaps an earlier one; "
            "`medusa calibrate` measures this one"
        )
    return found


def load_drafting(choice: Choice, backbone: "Backbone", tree: "Tree") -> "tuple[Drafter, Tree | Growth]":
    """The chosen drafter and what it drafts over; UserError where they do not fit."""
    from medusa_cli.drafters import load_drafter

    assert choice.drafter is not None
    drafter = load_drafter(choice.drafter, backbone)
    check_fit(tree, drafter, str(choice.tree or f"static:{choice.static}"))
    return drafter, tree if choice.dynamic is None else growth_of(choice, tree, drafter)


def growth_of(choice: Choice, tree: "Tree | Growth", drafter: "Drafter") -> "Growth":
    """Dynamic trees of as many nodes as --tree says, or as the static tree has, at the calibrated temperatures.

    Where `tree --budget auto` made the static tree, it knows from which chance on a node pays on this machine: then
    that alone decides, up to MOST_PAYING nodes.
    """
    from medusa_cli.tree import Growth

    least = _made(choice.tree).get("break_even", 0.0) if choice.tree else 0.0
    budget = choice.dynamic or (max(MOST_PAYING, tree.size) if least else tree.size)
    return Growth(budget, drafter.num_heads, _calibration(choice).temperatures, least)


def describe(shape: "Tree | Growth | None") -> str:
    """A tree in a few words."""
    from medusa_cli.tree import Growth

    if shape is None:
        return "no tree"
    return (
        f"dynamic trees of at most {shape.size} nodes" if isinstance(shape, Growth) else f"tree of {shape.size} nodes"
    )


def check_fit(tree: "Tree", drafter: Any, name: str) -> None:
    """UserError for a tree (a file, or what --tree says) that asks for more heads or guesses than the drafter has."""
    if tree.max_depth > drafter.num_heads:
        raise UserError(
            f"the tree {name} is {tree.max_depth} deep, the drafter has {drafter.num_heads} heads",
            f"make a tree with `medusa tree --heads {drafter.num_heads}`, or give another --tree",
        )
    vocabulary = len(getattr(drafter, "draft_ids", ())) or None
    if vocabulary is not None and max(tree.widths, default=0) > vocabulary:
        raise UserError(
            f"the tree {name} uses guess {max(tree.widths)}, the heads know {vocabulary} tokens", "use a narrower tree"
        )


def sampling_of(
    mode: str | None, temperature: float | None, top_p: float, top_k: int, random_seed: int | None
) -> "Sampling":
    """The decoding rule the sampling flags ask for; a temperature alone means exact sampling."""
    from medusa_cli.decoding.sampling import Sampling

    heat = temperature if temperature is not None else (0.7 if mode in ("exact", "typical") else 0.0)
    kind = mode or ("exact" if heat > 0 else "greedy")
    return Sampling(kind, heat, top_p, top_k, seed=random_seed or 0)
