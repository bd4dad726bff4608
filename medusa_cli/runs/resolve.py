"""From the names of a model, a run, a drafter and a tree to the files that belong together, nothing heavy loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.assets import DEFAULT_MODEL, check_hub
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.run import RUNS, Run

# A step verifies all nodes at once; far fewer than this pay anywhere.
MOST_GROWN = 256


# Quantization of weights by the fast engine, and by bitsandbytes.
INTEGER, BITSANDBYTES = ("int8", "int4"), ("bnb.int8", "bnb.nf4")


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a model: device, number type, engine, quantization, and if its own code may run."""

    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"
    quantize: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        methods = ("none", *INTEGER, *BITSANDBYTES)
        if self.quantize not in (None, *methods):
            raise UsageError(f"@quantize {self.quantize!r} is unknown", f"use one of {', '.join(methods)}")
        if self.quantize in INTEGER and self.engine == "eager":
            raise UsageError(f"@quantize {self.quantize} needs the fast engine", "leave it out, or use another method")

    @property
    def quantised(self) -> bool:
        """Returns True if bitsandbytes quantizes the weights."""
        return self.quantize in BITSANDBYTES


DEFAULT_LOADING = LoadOptions()


@dataclass(frozen=True)
class Choice:
    """What was asked for: the model's name, where drafter and tree lie, the run.

    auto: the size of tree is chosen by what steps cost here, and goes with the text. dynamic: the nodes of a tree grown
    for every step, 0 for as many as the static tree has, None for the static one. static: the nodes of a tree searched
    from the calibration, None for the one in the file. adapter: what joint training added to the model. calibration:
    where the heads' accuracies and temperatures are, if anywhere. lookup: whether the text itself suggests drafts, too,
    or alone where there is no drafter; lookup_named: that was said, and does not merely go with auto.
    """

    model: str
    drafter: Path | None
    tree: Path | None
    run: Run | None
    dynamic: int | None = None
    calibration: Path | None = None
    adapter: Path | None = None
    static: int | None = None
    auto: bool = False
    lookup: bool = False
    lookup_named: bool = False


def choose(
    model: str | None,
    run: str | None,
    drafter: Path | None,
    tree: str | None,
    *,
    need_drafter: bool = True,
    lookup: bool | None = None,
) -> Choice:
    """What was named first, then the run, then what ships for the model; UserError where nothing is to be had.

    lookup None: with trees of the size that pays.
    """
    target = Run.open(run) if run else None
    name = model or (target.model if target else None) or DEFAULT_MODEL
    auto = tree in (None, "auto")
    file, static, dynamic = (None, None, None) if auto else _tree_words(str(tree))
    if not need_drafter:
        return Choice(name, None, None, target, adapter=target.adapter if target else None, lookup=bool(lookup))
    source = target or Run.pretrained(name)
    if drafter is not None and source is not None and drafter.resolve() == source.drafter_dir.resolve():
        drafter = None  # named, but what is taken in any case
    if drafter is not None and target is None:
        source = None  # tree and temperatures of the drafter that ships are no other drafter's
    folder = drafter or (source.drafter_dir if source else None)
    if folder is None and lookup:
        return Choice(name, None, None, target, lookup=True)
    if folder is None:
        raise UserError(
            f"no drafter ships for the model {name!r}",
            f"train one with `medusa distill --model {name}` and `medusa train`, then give its @run; @lookup drafts "
            "without one",
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no drafter", "run `medusa train` first, or give another @drafter or @run")
    heat = source.calibration_path if source else None
    if static is not None and (heat is None or not heat.is_file()):
        remedy = "run `medusa calibrate` first" if source else "give the @run that it belongs to"
        raise UserError(f"@tree {tree}: {folder} is not calibrated", remedy)
    own = source.tree_path if source and source.tree_path.is_file() else None
    shape = None if static else file or own
    measured = heat is not None and heat.is_file()
    if shape is None and not (static or dynamic or (auto and measured)):  # a number of nodes needs no tree beside it
        remedy = f"make one with `medusa tree --run {run}`" if run else "give the @run that it belongs to"
        raise UserError(f"there is no tree for {folder}", f"{remedy}, or give @tree FILE")
    adapter = target.adapter if target and drafter is None else None
    looks = auto if lookup is None else lookup
    return Choice(name, folder, shape, target, dynamic, heat, adapter, static, auto, looks, bool(lookup))


def find_drafter(name: str) -> tuple[str | None, Path | None]:
    """What a drafter's name stands for: a run, or the folder of a drafter; UserError where it is neither nor a hub id.

    A run's name or folder, a drafter's folder, or a hub id of either.
    """
    place = Path(name).expanduser()
    if not place.is_dir() and (RUNS / name).is_dir():
        place = RUNS / name
    if not place.is_dir():
        check_hub(name, named="@drafter")
        from huggingface_hub import snapshot_download

        place = Path(snapshot_download(name, allow_patterns=["*.json", "*.yaml", "*.jinja", "*.safetensors"]))
    if (place / "drafter" / "config.json").is_file():
        return f"{place.absolute()}{os.sep}", None
    if (place / "config.json").is_file():
        return None, place
    raise UserError(f"@drafter {name!r}: {place} holds no drafter", "give a run, a drafter's folder, or a hub id")


def _tree_words(tree: str) -> tuple[Path | None, int | None, int | None]:
    """What a tree's name says: file, nodes of a static tree to search, of dynamic ones; UserError for anything else."""
    word, colon, number = tree.partition(":")
    if word not in ("static", "dynamic"):
        if not Path(tree).is_file():
            raise UserError(f"@tree {tree!r} is no file", "use auto, static, static:N, dynamic, dynamic:N or a file")
        return Path(tree), None, None
    if not colon:
        return None, None, None if word == "static" else 0
    if not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= MOST_GROWN:
        raise UsageError(f"@tree {tree!r}: {number!r} is no number of nodes", f"use 1 to {MOST_GROWN}")
    return None, *((int(number), None) if word == "static" else (None, int(number)))
