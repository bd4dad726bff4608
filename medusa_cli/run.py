"""The run directory: where each command leaves what the next one needs, who made it, and how it is written safely."""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_cli import __version__
from medusa_cli.errors import UserError

RUNS = Path("runs")
DEFAULT_RUN = "default"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path` in one move, on failure it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    handle, part = _temporary(path)
    try:
        yield part
        _to_disk(part)
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _temporary(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, locked as long as its writer lives, and its handle."""
    while True:
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
        except OSError as reason:
            reason.filename = str(path)  # the file that cannot be written, not its name for the time being
            raise
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another writer swept it away before it was locked


def _sweep(path: Path) -> None:
    """Remove what writers of `path` left that were killed: temporary files that nobody has locked."""
    ours = re.compile(re.escape(f".{path.name}.") + "[a-z0-9_]{8}" + re.escape(path.suffix))
    for left in path.parent.iterdir():
        if not ours.fullmatch(left.name):
            continue
        with suppress(OSError), left.open("rb") as held:  # it is written, or gone
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _to_disk(path: Path) -> None:
    """Wait until a file's content is on disk: a rename may get there first."""
    with path.open("rb") as written:
        os.fsync(written.fileno())


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill; on success it replaces `path`, on failure it is removed."""
    part, old = path.with_name(f".{path.name}.part"), _aside(path)
    restore(path)
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for written in part.rglob("*"):
            if written.is_file():
                _to_disk(written)
        if path.exists():
            path.rename(old)
        part.rename(path)
    finally:
        restore(path)
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)


def restore(path: Path) -> None:
    """Put a folder back whose replacement was cut off between its two moves."""
    if _aside(path).is_dir() and not path.exists():
        _aside(path).rename(path)


def _aside(path: Path) -> Path:
    """Where a folder lies while another one takes its place."""
    return path.with_name(f".{path.name}.old")


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a whole file under a temporary name, flush it to disk, then rename it."""
    with replacing(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, obj: Any) -> None:
    """Write one JSON document atomically."""
    write_atomic(path, json.dumps(obj, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str = "") -> Any:
    """Read a JSON document; UserError if it is missing, empty or cut off. `what` says which command writes it."""
    name = f"{what} {path}".strip()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as reason:
        raise UserError(f"{name} does not exist", "check the path") from reason
    except (UnicodeDecodeError, IsADirectoryError) as reason:
        raise UserError(f"{name} is no JSON text file", "check the path") from reason
    if not text.strip():
        raise UserError(f"{name} is empty", "write it again with the command that made it")
    try:
        return json.loads(text)
    except json.JSONDecodeError as reason:
        raise UserError(
            f"{name} is cut off or no JSON (line {reason.lineno}: {reason.msg})",
            "write it again with the command that made it",
        ) from reason


def read_object(path: Path, what: str = "") -> dict[str, Any]:
    """As read_json, and UserError for JSON that is no object."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        raise UserError(
            f"{what} {path}".strip() + " holds no JSON object", "write it again with the command that made it"
        )
    return data


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
        self.states_path = path / "states.bin"
        self.drafter_dir = path / "drafter"
        self.adapter_dir = path / "adapter"
        self.calibration_path = path / "calibration.json"
        self.tree_path = path / "tree.json"
        self.bench_dir = path / "bench"
        self.template_path = path / "chat_template.jinja"

    @classmethod
    def open(cls, name: str = DEFAULT_RUN, create: bool = False, flag: str = "--run") -> "Run":
        """The run runs/NAME, or the folder itself when the name has a path separator; UserError if it is missing.

        flag is what the error says named it.
        """
        path = cls._place(name)
        if create:
            path.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            raise UserError(f"{flag} {name!r}: {path} does not exist", "check the name, or run `medusa distill` first")
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
                return path.read_text(encoding="utf-8")
        return None

    def template_with(self, given: str | None) -> str | None:
        """The chat template to use where `given` is asked for; UserError where the run has another one."""
        known = self.chat_template
        if given is not None and known is not None and given != known:
            raise UserError(
                f"the run {self.path} lays out its conversations with another chat template, {self.template_path.name}",
                "leave chat_template out, or choose another --run",
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
        path = Path(__file__).parent / "pretrained" / model
        return cls(path) if (path / "drafter" / "config.json").is_file() else None

    @property
    def owner(self) -> dict[str, Any] | None:
        """The identity of the backbone that the run belongs to, None before its first use; UserError if it is lost."""
        marker = self.path / "run.json"
        if not marker.exists():
            return None
        made = read_json(marker, "the run's file")
        owner = made.get("backbone") if isinstance(made, dict) else None
        if not isinstance(owner, dict) or not isinstance(owner.get("id"), str):
            raise UserError(f"the run's file {marker} names no backbone", "delete it: the next command writes it anew")
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
        if known.get("fingerprint") is None and identity.get("fingerprint") is not None:
            write_json(marker, provenance(identity))  # bound without the weights at first: now they are known


def check_backbone(expected: dict[str, Any], actual: dict[str, Any], what: str) -> None:
    """Raise UserError unless both identities name the same weights; the id alone may differ (a moved folder).

    What one of them does not know (the fingerprint of weights that a server held) is not compared.
    """
    keys = ("architecture", "hidden_size", "vocab_size", "layers", "fingerprint")
    known = [key for key in keys if expected.get(key) is not None and actual.get(key) is not None]
    if any(expected[key] != actual[key] for key in known):

        def name(one: dict[str, Any]) -> str:
            return f"{one.get('id')!r} (hidden {one.get('hidden_size')}, vocabulary {one.get('vocab_size')})"

        raise UserError(
            f"{what} was made for the model {name(expected)}, not for {name(actual)}",
            f"give --model {expected.get('id')} or another --run",
        )
