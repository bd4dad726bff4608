"""The run directory: its files, its lock, and the records of which model, data and drafter made each file."""

import fcntl
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from medusa_cli import __version__
from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.files.io import nested, read_as, read_text, restore, sweep, write_atomic, write_json
from medusa_cli.files.paths import expanded

log = logging.getLogger(__name__)
LOCK = ".lock"
RUNS = Path("runs")
# Contains, for each model with a shipped drafter, a folder that is laid out like a run.
SHIPPED = Path(__file__).parent.parent / "pretrained"
DEFAULT_RUN = "default"
DRAFTER_CONFIG = "the drafter's config"
SHAPE = ("architecture", "hidden_size", "vocab_size", "layers")  # fields of a model's identity
STAMP = "drafter_stamp"  # the key of the drafter's stamp in files that were made for a drafter
# A model's id, architecture, sizes, and the digest of its weights.
Identity = dict[str, str | int | None]


def provenance(backbone: str | dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Returns the record of how a file was made: version, time, model and more."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"version": __version__, "created": now, "backbone": backbone, **extra}


@dataclass(frozen=True)
class Data:
    """Names the conversations from which a file was made."""

    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class TrainSection:
    """Holds the part of a recipe's section `train` that is read back: held-out fraction and settings of the loss."""

    validation_fraction: float | None = None
    decay: float | None = None
    soft: float | None = None
    regress: float | None = None
    scored: int | None = None


@dataclass(frozen=True)
class Settings:
    """Holds the part of a drafter's recipe that is read back."""

    train: TrainSection = TrainSection()
    drafter: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """Holds the part of a file's provenance that is read back."""

    backbone: Identity | str | None = None
    data: Data | None = None
    recipe: Settings = Settings()

    @property
    def identity(self) -> Identity:
        """Returns the model's identity; an empty dict if only the model's name was written."""
        return self.backbone if isinstance(self.backbone, dict) else {}

    def held_out(self, otherwise: float) -> float:
        """Returns the fraction of the conversations that training held out, or `otherwise` if it is unknown."""
        fraction = self.recipe.train.validation_fraction
        return otherwise if fraction is None else fraction


@dataclass(frozen=True)
class DrafterConfig:
    """Holds the config.json of a drafter of any kind; another tool's config does not state the kind.

    max_position_embeddings: the number of positions that another tool's drafter was made for.
    """

    drafter: str | None = None
    max_position_embeddings: int | None = None
    num_heads: int | None = None
    medusa_num_heads: int | None = None
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def heads(self) -> int | None:
        return self.medusa_num_heads if self.num_heads is None else self.num_heads


def few_positions(own: int, models: int) -> str:
    """Returns a warning about a drafter that was made for fewer positions than its model."""
    return (
        f"the drafter's config counts {own:,} positions (max_position_embeddings), the model {models:,}: in longer "
        "texts, fewer of its drafts may be right"
    )


def describe_drafter(folder: Path) -> DrafterConfig:
    """Returns a drafter's config; raises UserError if it is missing or invalid."""
    return read_as(Path(folder) / "config.json", DrafterConfig, DRAFTER_CONFIG)


def rounding_in(folder: Path) -> str | None:
    """Returns the quantization of the weights that a folder's drafter was trained on; None if it is unknown or none."""
    if not (folder / "config.json").is_file():
        return None
    rounding = describe_drafter(folder).provenance.identity.get("rounding")
    return None if rounding is None else str(rounding)


def stamp_of(folder: Path) -> str | None:
    """Returns a digest of a drafter's config, which differs for each training; None without a drafter."""
    config = folder / "config.json"
    return hashlib.sha256(config.read_bytes()).hexdigest()[:16] if config.is_file() else None


def outdated(stamp: str | None, folder: Path) -> bool:
    """Returns True if a stamp is known and belongs to another drafter than the one in the folder."""
    now = stamp_of(folder)
    return stamp is not None and now is not None and stamp != now


@dataclass(frozen=True)
class Distillation:
    """Holds a run's distill.json: the model that answered, and the settings that all its conversations share."""

    backbone: Identity | str | None = None
    settings: dict[str, str | int | float | bool | list[int | str] | None] = field(
        default_factory=dict
    )

    @property
    def taps(self) -> tuple[int, ...]:
        """Returns the layers whose hidden states are stored before the final states in each row."""
        taps = self.settings.get("taps")
        return tuple(tap for tap in taps if isinstance(tap, int)) if isinstance(taps, list) else ()


def describe_distillation(folder: Path) -> Distillation:
    """Returns the settings with which a run's conversations were distilled; an empty record if they are unknown."""
    path = folder / "distill.json"
    if not path.is_file():
        return Distillation()
    return read_as(path, Distillation, "the distillation's header")


def same(expected: dict[str, Any], actual: dict[str, Any], *keys: str) -> bool:
    """Returns True if two identities agree on the keys that both have. Servers report no digest of weights."""
    known = [key for key in keys if expected.get(key) is not None and actual.get(key) is not None]
    return all(expected[key] == actual[key] for key in known)


def check_backbone(
    expected: dict[str, Any], actual: dict[str, Any], what: str, *, tuned: bool = False
) -> None:
    """Raises UserError unless two identities agree on sizes and weights. The ids may differ, as a folder may move.

    tuned: accept other weights of the same architecture and sizes, such as those of a fine-tuned model.
    """
    keys = SHAPE if tuned else (*SHAPE, "weights")
    if same(expected, actual, *keys):
        return
    if expected.get("id") == actual.get("id") and same(expected, actual, *SHAPE):
        fault = f"{what} was made for earlier weights of {shown(actual.get('id'))}"
        raise UserError(fault, "use another @run")
    form = "{} (hidden {hidden_size}, vocabulary {vocab_size}, {layers} layers)"
    unknown = dict.fromkeys(SHAPE)
    names = [form.format(shown(own.get("id")), **unknown | own) for own in (expected, actual)]
    fault = f"{what} was made for the model {names[0]}, not for {names[1]}"
    raise UserError(fault, f"give @model {expected.get('id')} or another @run")


@contextmanager
def sole_writer(folder: Path, command: str) -> Iterator[None]:
    """Holds the run's lock for a command; raises UserError, with the holder's name, if another process has the lock.

    Creates the run's folder if it is missing. The system releases the lock of a killed process. Warns if a file system
    has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as reason:
            name, _, process = path.read_text(encoding="utf-8").partition("\n")
            # The holder may not have written its name yet.
            holder = f"`{name}` (process {process})" if process else "another process"
            fault = f"the run {folder} is being written by {holder}"
            raise UserError(fault, "wait until that has ended, or use another @run") from reason
        except OSError as reason:
            log.warning(
                f"{folder} cannot be locked ({reason.strerror}): do not run a second command on this run"
            )
        lock.truncate(0)
        lock.write(f"{command}\n{os.getpid()}")
        lock.flush()
        sweep(folder)
        yield


class Run:
    """Holds the folder of one experiment, and the path of each artifact. An artifact may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.recipe_path = path / "recipe.yaml"
        # Output of `distill`; the data to learn from is `data_path`.
        self.distill_path = path / "distill.jsonl"
        self.failed_path = path / "distill-failed.jsonl"  # seeds without a usable answer, and why
        self.states_path = path / "states.bin"
        self.cache_dir = path / "cache"  # states that were computed for a training
        self.drafter_dir = path / "drafter"
        self.adapter_dir = path / "adapter"
        self.calibration_path = path / "calibration.json"
        self.tree_path = path / "tree.json"
        self.bench_dir = path / "bench"
        self.template_path = path / "chat_template.jinja"

    @classmethod
    def open(cls, name: str = DEFAULT_RUN, create: bool = False, named: str = "@run") -> "Run":
        """Returns the run runs/NAME, or the folder itself if the name has a path separator.

        Raises UserError, which names the setting `named`, if the folder is missing.
        """
        run = cls.planned(name, named)
        if create:
            run.path.mkdir(parents=True, exist_ok=True)
        if not run.path.is_dir():
            raise UserError(
                f"{named} {name!r}: {run.path} does not exist",
                f"check the name, or run `medusa distill --run {shlex.quote(name)}` first",
            )
        return run

    @classmethod
    def planned(cls, name: str, named: str = "@run") -> "Run":
        """Returns a run whose folder may not exist yet; `sole_writer` creates it."""
        run = cls(cls.folder(name, named))
        for folder in (run.drafter_dir, run.adapter_dir):
            restore(folder)
        return run

    @classmethod
    def inside(cls, name: str) -> bool:
        """Returns True if a run of this name would be inside a run that has conversations."""
        return (cls.folder(name).parent / "distill.jsonl").is_file()

    @staticmethod
    def folder(name: str, named: str = "@run") -> Path:
        """Returns the folder of a run, which may not exist; raises UsageError for a name that no run can have."""
        if name in ("", ".", "..") or not name.isprintable():
            fault = f"{named} {ascii(name)} is not a name of a run"
            raise UsageError(fault, "use letters, digits and - or _")
        return expanded(name) if os.sep in name else RUNS / name

    @property
    def data_path(self) -> Path:
        """Returns the file of conversations to learn from: the run's own, else that of the enclosing run."""
        outer = self.path.parent / self.distill_path.name
        return outer if outer.is_file() and not self.distill_path.is_file() else self.distill_path

    @property
    def chat_template(self) -> str | None:
        """Returns the chat template of the run, else of the enclosing run; None means the tokenizer's template."""
        file = self.template_file
        return None if file is None else read_text(file, "the run's chat template")

    @property
    def template_file(self) -> Path | None:
        """Returns the file of the run's chat template, else of the enclosing run's; None if there is none."""
        for path in (self.template_path, self.data_path.with_name(self.template_path.name)):
            if path.is_file():
                return path
        return None

    def template_with(self, given: str | None) -> str | None:
        """Returns the chat template to use; raises UserError if `given` differs from the run's."""
        known = self.chat_template
        if given is not None and known is not None and given != known:
            raise UserError(
                f"the run {self.path} lays out its conversations with another chat template, {self.template_path.name}",
                "leave chat_template out, or choose another @run",
            )
        return given or known

    def keep_template(self, template: str | None) -> None:
        """Saves a chat template for later commands."""
        if template is not None and template != self.chat_template:
            write_atomic(self.template_path, template)

    @property
    def adapter(self) -> Path | None:
        """Returns the folder of the run's adapter, if it holds any file."""
        held = self.adapter_dir.is_dir() and any(self.adapter_dir.iterdir())
        return self.adapter_dir if held else None

    @classmethod
    def pretrained(cls, model: str) -> "Run | None":
        """Returns the drafter that ships for a model, laid out like a run; None if there is none."""
        path = SHIPPED / model
        return cls(path) if (path / "drafter" / "config.json").is_file() else None

    @classmethod
    def shipped_by_name(cls, model: str) -> "Run | None":
        """Returns the shipped drafter whose name is the beginning of a file's, a folder's or a hub id's name.

        The name of Qwen/Qwen2.5-Coder-0.5B-Instruct begins with qwen2.5-coder-0.5b, for example.
        """
        last = Path(model).name.lower()
        names = (path.name for path in SHIPPED.iterdir())
        fitting = [name for name in names if re.match(rf"{re.escape(name)}([-_.]|$)", last)]
        return cls.pretrained(max(fitting, key=len)) if fitting else None

    @classmethod
    def with_heads(cls, name: str) -> "Run":
        """Returns the run whose training continues: the run `name`, or the drafter that ships for the model `name`."""
        trained = cls(cls.folder(name)).drafter_dir.is_dir()
        shipped = None if trained else cls.pretrained(name)
        return shipped or cls.open(name, named="@from")

    @property
    def has_drafter(self) -> bool:
        """Returns True if the run holds a drafter."""
        return (self.drafter_dir / "config.json").is_file()

    @property
    def owner(self) -> dict[str, Any] | None:
        """Returns the identity of the run's model, None before the run is used; raises UserError for a damaged file."""
        marker = self.path / "run.json"
        remedy = "delete it, and give @model with the next command that loads the model, which writes it again"
        if not marker.exists():
            return None
        owner = read_as(marker, Provenance, "the run's file", remedy).identity
        if not isinstance(owner.get("id"), str):
            raise UserError(f"the run's file {marker} names no backbone", remedy)
        return owner

    @property
    def model(self) -> str | None:
        """Returns the name of the run's model, else of the enclosing run's, else of the drafter's; None if unknown.

        Raises UserError for a local model that is no longer there.
        """
        name = self.recorded_model
        if name is None or not os.path.isabs(name) or os.path.exists(name):
            return name
        # A fully tuned model lies in its run, which may have been moved.
        tuned = self.path / "model"
        if tuned.is_dir():
            return str(tuned)
        fault = f"the run {self.path} is for the model {name}, which is no longer there"
        raise UserError(fault, "give its new place as @model")

    @property
    def recorded_model(self) -> str | None:
        """Returns the name of the run's model as its files state it, or None."""
        owner = self.owner or Run(self.data_path.parent).owner
        if owner is None and self.has_drafter:
            owner = describe_drafter(self.drafter_dir).provenance.identity
        name = (owner or {}).get("id")
        return name if isinstance(name, str) else None

    @property
    def argument(self) -> str:
        """Returns the word that names the run on a command line, quoted for a shell."""
        if self.path.parent == RUNS:
            return shlex.quote(self.path.name)
        text = str(self.path)
        return shlex.quote(text if os.sep in text else text + os.sep)

    def bind(self, identity: dict[str, Any]) -> None:
        """Binds the run to a model at its first use; raises UserError if it belongs to another model."""
        marker = self.path / "run.json"
        known = self.owner
        if known is None:
            write_json(marker, provenance(identity))
            return
        check_backbone(known, identity, f"the run {self.path}")
        # A run with answers from a server is first bound without the digest of the weights.
        if known.get("weights") is None and identity.get("weights") is not None:
            write_json(marker, provenance({**known, "weights": identity["weights"]}))


def called(model: str) -> str:
    """Returns a model's name from its id or folder; a link keeps its own name, and "." becomes the folder's name."""
    return Path(os.path.abspath(model)).name


def verifier_of(config: dict[str, Any]) -> str | None:
    """Returns the verifier model named in a speculators config, or None if it names none."""
    name = nested(nested(config.get("speculators_config")).get("verifier")).get("name_or_path")
    return name if isinstance(name, str) else None
