"""The drafter to export, and the output folder, which is complete or absent and has a checksum for every file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from medusa_cli.drafters.io import drafter_kind, read_drafter
from medusa_cli.errors import UserError
from medusa_cli.files.catalogue import DEFAULT_MODEL
from medusa_cli.files.fetch import sha256_of
from medusa_cli.files.io import read_object, replacing_folder, restore, write_json
from medusa_cli.files.model_source import ModelSource
from medusa_cli.model.backbone import identity_of
from medusa_cli.model.load import read_config
from medusa_cli.runs.resolve import shipped_for
from medusa_cli.runs.run import RUNS, STAMP, Run, called, check_backbone, describe_drafter, stamp_of

CHECKSUMS = "SHA256SUMS"


def check_output(folder: Path, overwrite: bool = False) -> None:
    """Raises UserError if `folder` is not empty, unless it holds an earlier export and `overwrite` is set."""
    restore(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"@output {folder} is a file", "give the name of a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            fault = f"@output {folder} is not empty"
            raise UserError(fault, "give a new folder, or @overwrite to replace it")
        if not (folder / CHECKSUMS).is_file():
            fault = f"@output {folder} holds other files than an export"
            raise UserError(fault, "give a new folder")


@contextmanager
def exporting(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill, which then becomes `folder` together with its checksums.

    Raises UserError for a folder that `check_output` refuses.
    """
    check_output(folder, overwrite)
    with replacing_folder(folder) as part:
        yield part
        sums = [
            f"{sha256_of(path)}  {path.relative_to(part).as_posix()}\n"
            for path in sorted(part.rglob("*"))
            if path.is_file()
        ]
        (part / CHECKSUMS).write_text("".join(sums), encoding="utf-8")


def write_checkpoint(
    part: Path, file: str, tensors: Mapping[str, Tensor], config: dict[str, Any], page: str
) -> None:
    """Writes tensors to `file`, config.json and the page README.md into an export's folder."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / file)
    write_json(part / "config.json", config)
    (part / "README.md").write_text(page, encoding="utf-8")


@dataclass(frozen=True)
class Source:
    """Holds a run's drafter as it is on disk: kind, config (of the kind's class), and tensors by name.

    origin: the drafter's model. trusted: the model's Python files may run. repository: the hub repository that receives
    the export, if any.
    """

    run: Run
    origin: ModelSource
    kind: str
    config: Any
    tensors: dict[str, Tensor] = field(repr=False)
    trusted: bool = False
    repository: str | None = None

    @property
    def model(self) -> str:
        """Returns the name of the drafter's model."""
        return self.origin.name

    def name_of(self, output: Path) -> str:
        """Returns the name by which users refer to the export: its repository, or else its folder."""
        return self.repository or str(output)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Returns the run's calibration, or None if it has none."""
        path = self.run.calibration_path
        return read_object(path, "the calibration") if path.is_file() else None

    @property
    def bench(self) -> str | None:
        """Returns the newest `medusa bench` report on exactly this drafter, in Markdown; None if there is none."""
        stamp = stamp_of(self.run.drafter_dir)
        folder = self.run.bench_dir
        shipped = shipped_for(self.origin)
        # For a shipped drafter, bench writes to a run named after the model.
        if shipped is not None and shipped.path == self.run.path:
            folder = Run(RUNS / called(self.model)).bench_dir
        for path in sorted(folder.glob("*.json"), reverse=True):  # file names are times
            drafting = read_object(path, "the report").get("drafting") or {}
            if path.with_suffix(".md").is_file() and stamp in [
                entry.get(STAMP) for entry in drafting.values()
            ]:
                return path.with_suffix(".md").read_text(encoding="utf-8")
        return None


def find_source(run: str | None = None, model: str | None = None, trusted: bool = False) -> Source:
    """Returns a run's drafter, by default the drafter that ships for the model.

    Raises UserError if the drafter is unusable, or was trained for a model of other sizes.
    """
    origin = ModelSource.of(model or DEFAULT_MODEL)
    target = Run.open(run) if run else shipped_for(origin)
    if target is None:
        fault = f"no drafter ships for the model {model!r}"
        raise UserError(fault, "train one, then give its @run")
    folder = target.drafter_dir
    path = folder / "config.json"
    if not path.is_file():
        remedy = f"run `medusa train --run {target.argument}` or `medusa import` first"
        raise UserError(f"{folder} holds no drafter", remedy)
    kind = drafter_kind(folder)
    stored = read_object(path, "the drafter's config")
    config, tensors = read_drafter(kind, folder)
    if run and model:
        known = describe_drafter(folder).provenance.identity
        base = read_config(origin, trusted)
        sizes = identity_of(base, base.vocab_size, id=model)
        check_backbone(known, sizes, f"the drafter in {folder}", tuned=True)
    if run and model is None:
        owner = target.model or stored.get("base_model_name_or_path")
        origin = ModelSource.of(owner) if isinstance(owner, str) else origin
    return Source(target, origin, kind.name, config, tensors, trusted)
