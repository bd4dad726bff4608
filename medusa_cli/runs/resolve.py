"""Finds the files of model, run, drafter and tree that belong together, without loading them."""

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from medusa_cli.assets import DEFAULT_MODEL, check_hub
from medusa_cli.errors import UsageError, UserError
from medusa_cli.runs.run import RUNS, Run, rounding_in

log = logging.getLogger(__name__)
MAX_NODES = 256  # of --tree static:N and dynamic:N; far fewer pay anywhere
# Quantization of weights by the fast engine, and by bitsandbytes.
INTEGER, BITSANDBYTES = ("int8", "int4"), ("bnb.int8", "bnb.nf4")
WORDS = {
    "dtype": ("auto", "bf16", "fp16", "fp32"),
    "engine": ("auto", "eager", "fast"),
    "quantize": ("none", *INTEGER, *BITSANDBYTES),
}


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a model: device, number type, engine, quantization, and if its own code may run."""

    device: str = "auto"
    dtype: str = "auto"
    engine: str = "auto"
    quantize: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", self.device):
            raise UsageError(f"@device {self.device!r} is unknown", "use auto, cpu, mps, cuda or cuda:N")
        for name, words in WORDS.items():
            if (value := getattr(self, name)) not in (*words, None):
                raise UsageError(f"@{name} {value!r} is unknown", f"use one of {', '.join(words)}")
        if self.quantize in INTEGER and self.engine == "eager":
            raise UsageError(f"@quantize {self.quantize} needs the fast engine", "leave it out, or use another method")

    @property
    def quantised(self) -> bool:
        """Returns True if bitsandbytes quantizes the weights."""
        return self.quantize in BITSANDBYTES


DEFAULT_LOADING = LoadOptions()
Options = TypeVar("Options", bound=LoadOptions)


def as_trained(options: Options, drafter: Path | None) -> Options:
    """Returns the options with the quantization that a folder's drafter was trained on, unless one is given.

    Warns if another one is given.
    """
    trained = rounding_in(drafter) if drafter is not None else None
    if trained in (None, options.quantize):
        return options
    if options.quantize is None:
        log.info(f"quantizing the model by {trained}, as {drafter} was trained on it; @quantize none loads it whole")
        return replace(options, quantize=trained)
    log.warning(
        f"{drafter} was trained on the model quantized by {trained}: its drafts, and an adapter beside it, fit other "
        f"weights less; @quantize {trained} loads those"
    )
    return options


@dataclass(frozen=True)
class Choice:
    """The model's name, the files of drafter and tree, and the run.

    auto: a tree of the size that pays here. static: nodes of a tree searched by the calibration (None: that of the file
    `tree`). dynamic: nodes of a tree grown for every step (0: as many as the static one has; None: static). adapter:
    what stage 2 added to the model. lookup: draft n-gram matches, too, or alone without a drafter; lookup_named: on
    request, not only by `auto`.
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

    @property
    def trained(self) -> Path | None:
        """Returns the folder of the drafter, or of the run's one where decoding is plain."""
        return self.drafter or (self.run.drafter_dir if self.run else None)


def choose(
    model: str | None,
    run: str | None,
    drafter: Path | None,
    tree: str | None,
    *,
    need_drafter: bool = True,
    lookup: bool | None = None,
) -> Choice:
    """Returns what was named, else the run's, else what ships for the model; raises UserError for missing files.

    lookup None: with `auto` trees.
    """
    target = Run.open(run) if run else None
    name = model or (target.model if target else None) or DEFAULT_MODEL
    auto = tree in (None, "auto")
    file, static, dynamic = (None, None, None) if auto else _parse_tree(str(tree))
    if not need_drafter:
        return Choice(name, None, None, target, adapter=target.adapter if target else None, lookup=bool(lookup))
    source = target or Run.pretrained(name)
    if drafter is not None and source is not None and drafter.resolve() == source.drafter_dir.resolve():
        drafter = None  # the one that is taken in any case
    if drafter is not None and target is None:
        source = None  # the tree and temperatures that ship fit no other drafter
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
    calibrated = source is not None and source.calibration_path.is_file()
    if static is not None and not calibrated:
        remedy = "run `medusa calibrate` first" if source else "give the @run that it belongs to"
        raise UserError(f"@tree {tree}: {folder} is not calibrated", remedy)
    if static is None and file is None and source is not None and source.tree_path.is_file():
        file = source.tree_path
    if file is None and not (static or dynamic or (auto and calibrated)):
        remedy = f"make one with `medusa tree --run {run}`" if run else "give the @run that it belongs to"
        raise UserError(f"there is no tree for {folder}", f"{remedy}, or give @tree FILE")
    return Choice(
        name,
        folder,
        file,
        target,
        dynamic,
        source.calibration_path if source else None,
        target.adapter if target and drafter is None else None,
        static,
        auto,
        auto if lookup is None else lookup,
        bool(lookup),
    )


def find_drafter(name: str) -> tuple[str | None, Path | None]:
    """Returns the run or the drafter's folder that a name, a folder or a hub id means; raises UserError if none."""
    path = Path(name).expanduser()
    if not path.is_dir() and (RUNS / name).is_dir():
        path = RUNS / name
    if not path.is_dir():
        check_hub(name, named="@drafter")
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(name, allow_patterns=["*.json", "*.yaml", "*.jinja", "*.safetensors"]))
    if (path / "drafter" / "config.json").is_file():
        return f"{path.absolute()}{os.sep}", None
    if (path / "config.json").is_file():
        return None, path
    raise UserError(f"@drafter {name!r}: {path} holds no drafter", "give a run, a drafter's folder, or a hub id")


def _parse_tree(tree: str) -> tuple[Path | None, int | None, int | None]:
    """Returns the file, the nodes of a static tree, and those of a dynamic one."""
    word, colon, number = tree.partition(":")
    if word not in ("static", "dynamic"):
        if not Path(tree).is_file():
            raise UserError(f"@tree {tree!r} is no file", "use auto, static, static:N, dynamic, dynamic:N or a file")
        return Path(tree), None, None
    nodes = None if word == "static" else 0
    if colon:
        if not (number.isascii() and number.isdigit()) or not 1 <= int(number) <= MAX_NODES:
            raise UsageError(f"@tree {tree!r}: {number!r} is no number of nodes", f"use 1 to {MAX_NODES}")
        nodes = int(number)
    return (None, nodes, None) if word == "static" else (None, None, nodes)
