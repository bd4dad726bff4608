"""Resolution of the model, run, drafter and tree that belong together, without loading them."""

import logging
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_cli.errors import UsageError, UserError
from medusa_cli.files import mtp_layer
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.hub import hub_folder
from medusa_cli.files.io import read_as, read_object, restore
from medusa_cli.files.model_files import check_model_files
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.paths import expanded
from medusa_cli.runs.run import (
    DEFAULT_RUN,
    DRAFTER_CONFIG,
    RUNS,
    SHAPE,
    SHIPPED,
    Identity,
    Run,
    describe_drafter,
    outdated,
    same,
    verifier_of,
)

log = logging.getLogger(__name__)
# Files in a drafter's repository. The weights are fetched as well if there is no folder drafter/.
PATTERNS = (
    "config.json",
    "tree.json",
    "calibration.json",
    "chat_template.jinja",
    "adapter/*",
    "drafter/*",
)
# Keys in drafters' configs: those of this program, of speculators, of EAGLE-3 in serving engines,
# of Medusa, of Hydra, and of assistants.
DRAFTER_KEYS = {
    "drafter",
    "speculators_model_type",
    "draft_vocab_size",
    "medusa_num_heads",
    "hydra_num_heads",
    "backbone_hidden_size",
}
MAX_NODES = 256  # limit of --tree static:N and dynamic:N; the best sizes are far smaller


class NoDrafter(UserError):
    """Says that no drafter ships for a model and none was given; `plain` is the choice without a drafter."""

    plain: "Choice"


@dataclass(frozen=True)
class TreeChoice:
    """Describes the draft tree that was requested.

    kind: "auto" (the fastest size on this machine), "static", "dynamic" (grown for every step) or "file". nodes: the
    size of a static tree, which is searched with the calibration, or of a dynamic tree; None: the size of the file's
    tree. file: the file of the given tree, or of the run's tree.
    """

    kind: str = "auto"
    nodes: int | None = None
    file: Path | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return str(self.file)
        return self.kind if self.nodes is None else f"{self.kind}:{self.nodes}"

    @property
    def searched(self) -> bool:
        """Returns True if a tree of the given size is searched with the calibration."""
        return self.kind == "static" and self.nodes is not None

    @classmethod
    def parse(cls, text: str | None) -> "TreeChoice":
        """Parses auto (None), static[:N], dynamic[:N] or a file's name; raises UserError for anything else."""
        if text in (None, "auto"):
            return cls()
        kind, colon, number = text.partition(":")
        if kind in ("static", "dynamic"):
            return cls(kind, _parse_nodes(text, number) if colon else None)
        if not Path(text).is_file():
            fault = f"@tree {text!r} is not a file"
            raise UserError(fault, "use auto, static, static:N, dynamic, dynamic:N or a file")
        return cls("file", file=Path(text))


def _parse_nodes(tree: str, number: str) -> int:
    if re.fullmatch("[0-9]{1,3}", number) and 1 <= int(number) <= MAX_NODES:
        return int(number)
    fault = f"@tree {tree!r}: {number!r} is not a valid number of nodes"
    raise UsageError(fault, f"use 1 to {MAX_NODES}")


@dataclass(frozen=True)
class Choice:
    """Holds the model, the files of drafter and tree, and the run.

    adapter: the adapter that stage 2 trained. lookup: True drafts n-gram matches, also without a drafter; None drafts
    them only with a drafter and the tree `auto`. chat_template: a Jinja template that replaces those of the model and
    the run. home: for a drafter that was given by name, its run or a folder that is laid out like a run.
    """

    source: ModelSource
    drafter: Path | None = None
    tree: TreeChoice = TreeChoice()
    run: Run | None = None
    calibration: Path | None = None
    adapter: Path | None = None
    lookup: bool | None = None
    chat_template: str | None = None
    home: Run | None = None

    @property
    def model(self) -> str:
        """Returns the model's name."""
        return self.source.name

    @property
    def ngrams(self) -> bool:
        """Returns True if n-gram matches are drafted."""
        if self.lookup is None:
            return self.drafter is not None and self.tree.kind == "auto"
        return self.lookup

    @property
    def calibrated(self) -> bool:
        """Returns True if the drafter's accuracies were measured."""
        return self.calibration is not None and self.calibration.is_file()

    @property
    def template(self) -> str | None:
        """Returns the chat template that replaces the model's own, or None."""
        owner = self.home or self.run
        return self.chat_template or (owner.chat_template if owner else None)

    @property
    def template_file(self) -> Path | None:
        """Returns the file whose chat template replaces the model's, if it comes with a run or a drafter."""
        owner = self.home or self.run
        return owner.template_file if owner and not self.chat_template else None

    @property
    def trained(self) -> Path | None:
        """Returns the folder of the drafter or, for plain decoding, of the run's drafter."""
        return self.drafter or (self.run.drafter_dir if self.run else None)


def choose(
    model: ModelSource | None,
    run: str | None,
    drafter: str | None,
    tree: str | None,
    *,
    need_drafter: bool = True,
    lookup: bool | None = None,
) -> Choice:
    """Resolves the model, drafter and tree: those given, else the run's, else the ones that ship.

    Raises UserError for missing files.
    """
    named = None if drafter is None else _named(drafter)
    target = Run.open(run) if run else None
    if named and named.run and target and target.has_drafter:
        raise UsageError("@run and @drafter both name a run", "leave one of them out")
    source = model or ModelSource.of(_model_for(named, target))
    asked = TreeChoice.parse(tree)
    plain = Choice(source, run=target, adapter=target.adapter if target else None, lookup=lookup)
    if not need_drafter:
        return plain
    default = target or shipped_for(source)
    if named is None:
        return _with_default(plain, default, asked)
    return _with_named(plain, named, default, asked)


@dataclass(frozen=True)
class _Named:
    """Holds a drafter given by name: its folder (None for the model's MTP layer) and the run that contains it."""

    folder: Path | None
    run: Run | None = None


def _named(drafter: str) -> _Named:
    return _Named(None) if means_mtp(drafter) else _Named(*find_drafter(drafter))


def _model_for(named: _Named | None, target: Run | None) -> str:
    """Returns the model of the given run or drafter, or else the default model."""
    owner = target or (named.run if named else None)
    folder = named.folder if named else None
    return (owner.model if owner else None) or _model_of(folder) or DEFAULT_MODEL


def _with_default(plain: Choice, default: Run | None, asked: TreeChoice) -> Choice:
    """Returns a choice with the drafter of the run or the shipped one; if there is neither, `lookup` must be True."""
    # A run without a drafter is an error, unless n-gram matches are drafted instead.
    if default is not None and (default.has_drafter or not plain.lookup):
        return _with_drafter(plain, default.drafter_dir, default, asked)
    if not plain.lookup:
        raise _no_drafter(plain)
    if asked.kind != "auto":
        raise UsageError(f"@tree {asked} has no effect without a drafter", "leave it out")
    return plain


def _with_named(plain: Choice, named: _Named, default: Run | None, asked: TreeChoice) -> Choice:
    """Returns a choice with a drafter that was given by name."""
    folder = named.folder or mtp_layer.own_drafter(plain.source)
    if default is not None and folder.resolve() == default.drafter_dir.resolve():
        return _with_drafter(plain, folder, default, asked)
    # The adapter of a run with a drafter fits only that drafter. The tree that ships fits only the shipped drafter.
    home = named.run
    owner = home if plain.run is None or plain.run.has_drafter else plain.run
    plain = replace(plain, adapter=owner.adapter if owner else None, home=home)
    return _with_drafter(plain, folder, home or plain.run, asked)


def _with_drafter(plain: Choice, folder: Path, source: Run | None, asked: TreeChoice) -> Choice:
    """Returns a choice with a drafter, and with the tree and calibration of the run `source`."""
    if not (folder / "config.json").is_file():
        train = f"medusa train --run {source.argument}" if source else "medusa train"
        fault = f"{folder} holds no drafter"
        raise UserError(fault, f"run `{train}` first, or give another @drafter or @run")
    return replace(
        plain,
        drafter=folder,
        tree=_with_file(asked, folder, source),
        calibration=source.calibration_path if source else None,
    )


def shipped_for(model: ModelSource) -> Run | None:
    """Returns the drafter that ships for a model, found by the name of the model, or of its file, folder or hub id.

    Unless it is found by the model's name, the model must have the shape of the drafter's model.
    """
    if (named := Run.pretrained(model.name)) is not None:
        return named
    shipped = Run.shipped_by_name(model.name)
    if shipped is None:
        return None
    return shipped if _has_shape(shipped, model) else None


def shipped_by_shape(model: ModelSource) -> list[Run]:
    """Returns the shipped drafters of models with the same architecture and sizes."""
    runs = map(Run, sorted(SHIPPED.iterdir()))
    return [run for run in runs if run.drafter_dir.is_dir() and _has_shape(run, model)]


def _has_shape(run: Run, model: ModelSource) -> bool:
    """Returns True if a run's drafter was trained for a model of the same architecture and sizes."""
    if model.fields is None:  # a hub id that is not in the cache
        model = ModelSource.of(str(hub_folder(model.name, ["config.json"], "@model")))
    text = model.text_fields
    shape = {"architecture": text.get("model_type"), "layers": text.get("num_hidden_layers")}
    shape |= {key: text.get(key) for key in ("hidden_size", "vocab_size")}
    identity = describe_drafter(run.drafter_dir).provenance.identity
    return same(identity, shape, *SHAPE)


def _no_drafter(plain: Choice) -> NoDrafter:
    model = plain.source
    if model.kind != "gguf":  # unpacking a GGUF file takes time
        check_model_files(model)
    name = shlex.quote(model.name)
    remedy = f"`medusa tune {name}` trains one; @lookup drafts without one"
    if mtp_layer.layout_of(model) is not None:
        remedy = f"its own checkpoint holds an MTP layer: give @drafter {mtp_layer.NAME}"
    elif related := shipped_by_shape(model):
        remedy = f"@drafter {related[0].name} has its shape, and `medusa tune {name}` trains that further"
    reason = NoDrafter(f"no drafter ships for the model {model.name!r}", remedy)
    reason.plain = plain
    return reason


def _with_file(tree: TreeChoice, folder: Path, source: Run | None) -> TreeChoice:
    """Returns the choice with the tree file of the run `source`; raises UserError if tree or calibration is missing."""
    if tree.kind == "file":
        return tree
    remedy = "give the @run that it belongs to"
    if tree.searched:
        if source is not None:
            if source.calibration_path.is_file():
                return tree
            remedy = f"run `medusa calibrate --run {source.argument}` first"
        raise UserError(f"@tree {tree}: {folder} is not calibrated", remedy)
    if source is not None and source.tree_path.is_file():
        return replace(tree, file=source.tree_path)
    if tree.nodes is not None or tree.kind == "auto":
        return tree
    if source is not None:
        remedy = f"make one with `medusa tree --run {source.argument}`"
    raise UserError(f"there is no tree for {folder}", f"{remedy}, or give @tree FILE")


def named_drafter(name: str | None, model: ModelSource) -> Path | None:
    """Returns the folder of the drafter that a name refers to for a model; None if no name is given."""
    if name is None:
        return None
    return mtp_layer.own_drafter(model) if means_mtp(name) else find_drafter(name)[0]


def means_mtp(name: str) -> bool:
    """Returns True if a drafter's name is "mtp", and neither a folder nor a run has that name."""
    return name == mtp_layer.NAME and not Path(name).is_dir() and not (RUNS / name).is_dir()


def find_drafter(name: str) -> tuple[Path, Run | None]:
    """Returns the folder of the drafter that a run, a folder or a hub id names, and the run that it is used with.

    The run may also be the drafter's own folder, if it holds a tree or a calibration; None if there is no run. Raises
    UserError if the name refers to no drafter.
    """
    path = expanded(name)
    restore(path)
    if not path.is_dir():
        path = RUNS / name
        shipped = Run.pretrained(name)
        # `bench` creates a run with a shipped drafter's name, but without a drafter.
        if shipped is not None and not (path / "drafter").is_dir():
            path = shipped.path
    if not path.is_dir():
        path = _fetched(name)
    for part in ("drafter", "adapter"):
        restore(path / part)
    folder = path / "drafter" if (path / "drafter" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        fault = f"@drafter {name!r}: {path} holds no drafter"
        raise UserError(fault, "give a run, a drafter's folder, or a hub id")
    _check_drafter(name, folder)
    # Exports have the tree and the calibration next to the weights.
    if any((folder / file).is_file() for file in ("tree.json", "calibration.json")):
        return folder, Run(folder)
    return folder, Run(path) if folder != path else None


def _fetched(name: str) -> Path:
    """Returns a drafter's folder from the hub, without the weights of a model that is stored next to it."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        fault = f"@drafter {name!r} does not exist"
        raise UserError(fault, "give a run, a drafter's folder, or a hub id")
    path = hub_folder(name, PATTERNS, "@drafter")
    if (path / "drafter" / "config.json").is_file():
        return path
    if (path / "config.json").is_file():
        _check_drafter(name, path)
    return hub_folder(name, [*PATTERNS, "*.safetensors", "*.index.json"], "@drafter")


def _check_drafter(name: str, folder: Path) -> None:
    """Raises UserError if a folder's config is that of a model."""
    if not is_drafter(read_object(folder / "config.json", DRAFTER_CONFIG)):
        fault = f"@drafter {name!r} is not a drafter: its config is a model's"
        raise UserError(fault, "give a drafter's run, folder or repository, or @model")


def is_drafter(config: dict[str, Any]) -> bool:
    """Returns True for a drafter's config, from this or another tool; models' configs have none of DRAFTER_KEYS."""
    named = str(config.get("architectures")).lower()
    return "eagle" in named or not DRAFTER_KEYS.isdisjoint(config)


def _model_of(folder: Path | None) -> str | None:
    """Returns the name of the model that a drafter was trained for, if its config states it."""
    if folder is None:
        return None
    name = describe_drafter(folder).provenance.identity.get("id")
    if name is None:
        config = read_object(folder / "config.json", DRAFTER_CONFIG)
        name = config.get("base_model_name_or_path") or verifier_of(config)
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class Calibration:
    """Holds each head's accuracies [K][top] (empty: not measured) and temperature, the model, and the drafter's stamp.

    read_calibration adds the path, the number of heads (None: unknown), and whether the run now has another drafter.
    """

    accuracies: list[list[float]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    backbone: Identity | str = ""
    drafter_stamp: str | None = None
    path: str | None = None
    heads: int | None = None
    stale: bool = False

    def first(self, number: int | None) -> "Calibration":
        """Returns the calibration of the first `number` heads (None: all); raises UsageError if it has fewer heads."""
        if number is None:
            return self
        if number < 1 or (self.heads is not None and number > self.heads):
            known = f"1 to {self.heads}" if self.heads is not None else "1 or more"
            raise UsageError(f"@heads {number} is not valid", f"use {known}")
        return replace(self, accuracies=self.accuracies[:number], heads=number)

    def check_current(self) -> None:
        """Raises UserError if the run's drafter was trained again after the calibration."""
        if self.stale and self.path is not None:
            run = Run(Path(self.path).parent)
            remedy = f"run `medusa calibrate --run {run.argument}` again"
            raise UserError(f"{self.path} was measured on an earlier drafter of this run", remedy)


def read_calibration(path: Path, drafter: Path | None = None) -> Calibration:
    """Reads a calibration, and compares it with the drafter in a folder, if given.

    Raises UserError unless there are accuracies from 0 to 1 for every head, and temperatures above 0.
    """
    remedy = "write it with `medusa calibrate`"
    file = read_as(path, Calibration, "the calibration", remedy)
    rows = file.accuracies
    if not rows or not all(row and all(0 <= share <= 1 for share in row) for row in rows):
        fault = f"the calibration {path} has no table of accuracies between 0 and 1"
        raise UserError(fault, remedy)
    if not all(value > 0 for value in file.temperatures):
        raise UserError(f"the calibration {path} has temperatures that are not above 0", remedy)
    stale = drafter is not None and outdated(file.drafter_stamp, drafter)
    return replace(file, path=str(path), heads=len(rows), stale=stale)


def find_calibration(run: str | None, file: Path | None) -> tuple[Run | None, Calibration, str]:
    """Returns the run for which a tree is made, its calibration, and a description of the calibration's source.

    In order of preference: the given file, the given run, the default run if it is calibrated, the shipped drafter.
    """
    if file is not None:
        return Run.open(run) if run else None, read_calibration(file), str(file)
    default = RUNS / DEFAULT_RUN
    if run is not None or (default / "calibration.json").is_file():
        target = Run.open(run or DEFAULT_RUN)
        folder = target.drafter_dir
        source = f"the run {target.path}"
        if target.calibration_path.is_file():
            return target, read_calibration(target.calibration_path, folder), source
        if not (folder / "config.json").is_file():
            return target, Calibration(), source
        config = describe_drafter(folder)
        known = Calibration(backbone=config.provenance.backbone or "", heads=config.heads)
        return target, known, source
    shipped = Run.pretrained(DEFAULT_MODEL)
    if shipped is not None and shipped.calibration_path.is_file():
        source = f"the drafter that ships for {DEFAULT_MODEL}, as {default} is not calibrated"
        return None, read_calibration(shipped.calibration_path), source
    return None, Calibration(), f"the run {default}"
