"""One writer a run: a second one is refused at once, and a killed one holds nothing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_cli import __version__
from medusa_cli.errors import UsageError, UserError, shown
from medusa_cli.runs.io import convert, read_json, read_object, read_text, restore, sweep, write_atomic, write_json

NAME = ".lock"


@contextmanager
def sole_writer(folder: Path, what: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the run's lock as the command `what`; UserError, naming the one that holds it, where another does.

    The system frees the lock of a process that was killed. `warn` is told where a file system knows no locks.
    """
    from filelock import FileLock, Timeout

    path = folder / NAME
    # Without locks it would fall back to one that a killed process leaves behind.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as reason:
        raise UserError(
            f"the run {folder} is being written by {_holder(path)}", "wait until that has ended, or use another @run"
        ) from reason
    except PermissionError:
        raise
    except OSError as reason:
        warn(f"{folder} cannot be locked ({reason.strerror}): let no second command write this run")
        yield
        return
    try:
        path.write_text(f"{os.getpid()}\n{what}\n{time.time()}\n", encoding="utf-8")
        sweep(folder)
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """The process that holds a lock, and for how long, as it said itself."""
    try:
        pid, what, since = path.read_text(encoding="utf-8").split("\n")[:3]
        return f"`{what}` (process {int(pid)}, for {_duration(time.time() - float(since))})"
    except (OSError, ValueError):  # it has the lock, but has not said so yet
        return "another process"


def _duration(seconds: float) -> str:
    """Seconds in words: 40 s, 12 min, 3.5 h."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


RUNS = Path("runs")
DEFAULT_RUN = "default"
# What of a backbone's identity names its weights.
DIGESTS = ("fingerprint", "weights")


def provenance(backbone: str | dict[str, Any], **extra: Any) -> dict[str, Any]:
    """What every file says of its making: the tool's version, the time, the backbone, and what else is given."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"version": __version__, "created": now, "backbone": backbone, **extra}


class Run:
    """One experiment's folder; each path is where that artefact lives, whether it exists yet or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.recipe_path = path / "recipe.yaml"
        self.distill_path = path / "distill.jsonl"  # what `distill` writes; `data_path` is what to learn from
        self.failed_path = path / "distill-failed.jsonl"  # the seeds that got no usable answer, and why
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
        """The run runs/NAME, or the folder itself when the name has a path separator; UserError if it is missing.

        named: by what, as an error says.
        """
        path = cls._place(name)
        if name in ("", ".", "..") or not name.isprintable():
            raise UsageError(f"{named} {ascii(name)} is no name of a run", "use letters, digits and - or _")
        if create:
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise UserError(f"{named} {name!r}: {path} does not exist", "check the name, or run `medusa distill` first")
        run = cls(path)
        for folder in (run.drafter_dir, run.adapter_dir):
            restore(folder)
        return run

    @classmethod
    def inside(cls, name: str) -> bool:
        """Whether a run of this name would lie in one that has data to learn from."""
        return (cls._place(name).parent / "distill.jsonl").is_file()

    @staticmethod
    def _place(name: str) -> Path:
        return Path(name) if os.sep in name else RUNS / name

    @property
    def data_path(self) -> Path:
        """The distilled conversations to learn from: the run's own, else those of the run that it lies in."""
        outer = self.path.parent / self.distill_path.name
        return outer if outer.is_file() and not self.distill_path.is_file() else self.distill_path

    @property
    def chat_template(self) -> str | None:
        """The template of the run's conversations where it is not the tokenizer's own; that of the run it lies in."""
        for path in (self.template_path, self.data_path.with_name(self.template_path.name)):
            if path.is_file():
                return read_text(path, "the run's chat template")
        return None

    def template_with(self, given: str | None) -> str | None:
        """The chat template to use where `given` is asked for; UserError where the run has another one."""
        known = self.chat_template
        if given is not None and known is not None and given != known:
            raise UserError(
                f"the run {self.path} lays out its conversations with another chat template, {self.template_path.name}",
                "leave chat_template out, or choose another @run",
            )
        return given or known

    def keep_template(self, template: str | None) -> None:
        """Leave a chat template for the commands to come."""
        if template is not None and template != self.chat_template:
            write_atomic(self.template_path, template)

    @property
    def adapter(self) -> Path | None:
        """The folder of the run's adapter, where joint training left one."""
        return self.adapter_dir if (self.adapter_dir / "adapter_config.json").is_file() else None

    @classmethod
    def pretrained(cls, model: str) -> "Run | None":
        """The drafter that ships for a model, laid out like a run; None where none ships."""
        path = Path(__file__).parent.parent / "pretrained" / model
        return cls(path) if (path / "drafter" / "config.json").is_file() else None

    @property
    def owner(self) -> dict[str, Any] | None:
        """The identity of the backbone that the run belongs to, None before its first use; UserError if it is lost."""
        marker = self.path / "run.json"
        if not marker.exists():
            return None
        from medusa_cli.runs.provenance import Made

        made = read_json(marker, "the run's file")
        remedy = "delete it: the next command writes it anew"
        owner = convert(made, Made, f"the run's file {marker}", remedy).identity if isinstance(made, dict) else {}
        if not isinstance(owner.get("id"), str):
            raise UserError(f"the run's file {marker} names no backbone", remedy)
        return owner

    @property
    def model(self) -> str | None:
        """The name of the backbone that the run belongs to."""
        owner = self.owner
        return None if owner is None else str(owner["id"])

    def bind(self, identity: dict[str, Any]) -> None:
        """Tie the run to a backbone at first use; UserError, naming both, if it belongs to another one."""
        marker, known = self.path / "run.json", self.owner
        if known is None:
            write_json(marker, provenance(identity))
            return
        check_backbone(known, identity, f"the run {self.path}")
        # Bound without the weights at first, or before there was a digest of them all: now they are known.
        learnt = {key: identity[key] for key in DIGESTS if known.get(key) is None and identity.get(key) is not None}
        if learnt:
            write_json(marker, provenance({**known, **learnt}))


def called(model: str) -> str:
    """The name of a model by its id or folder; a link goes by its own name, "." by that of the folder it is."""
    return Path(os.path.abspath(model)).name


def rounding_in(folder: Path) -> str | None:
    """How the backbone's weights were rounded when the drafter in a folder was trained; None: whole, or not known."""
    path = folder / "config.json"
    made = read_object(path, "the drafter's config").get("provenance") if path.is_file() else None
    owner = made.get("backbone") if isinstance(made, dict) else None
    return owner.get("rounding") if isinstance(owner, dict) else None


def check_backbone(expected: dict[str, Any], actual: dict[str, Any], what: str) -> None:
    """Raise UserError unless both identities name the same weights; the id alone may differ (a moved folder).

    What one of them does not know (the weights that a server held, all of them in an earlier version) is not compared.
    """
    keys = ("architecture", "hidden_size", "vocab_size", "layers", *DIGESTS)
    known = [key for key in keys if expected.get(key) is not None and actual.get(key) is not None]
    if any(expected[key] != actual[key] for key in known):

        def name(one: dict[str, Any]) -> str:
            return f"{shown(one.get('id'))} (hidden {one.get('hidden_size')}, vocabulary {one.get('vocab_size')})"

        raise UserError(
            f"{what} was made for the model {name(expected)}, not for {name(actual)}",
            f"give @model {expected.get('id')} or another @run",
        )
