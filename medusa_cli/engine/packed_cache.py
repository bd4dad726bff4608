"""The files of packed weights in the cache: names with digests of all that the weights depend on, and checks."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from medusa_cli.engine.description import Description
from medusa_cli.files.cpus import sysctl
from medusa_cli.files.io import write_atomic
from medusa_cli.files.model_source import ModelSource
from medusa_cli.files.paths import home

# The code that reads a model's weights and packs them: paths in the package.
CODE = (
    *("engine/packed.py", "engine/experts.py", "model/weights.py", "model/conversion.py"),
    *("files/gguf_header.py", "files/gguf_names.py", "native/matrix.py"),
    *("native/formats.h", "native/formats.cpp"),
)
# CODE, and the code that reads a drafter's weights and determines the matrices of the drafter's
# parts and their order.
DRAFTER_CODE = (
    *CODE,
    *("drafters/*.py", "files/safetensors_files.py", "engine/linear.py", "engine/native_layer.py"),
)
# Other packages that read and convert weights.
PACKAGES = ("transformers", "safetensors", "gguf")
BOOT = Path("/proc/sys/kernel/random/boot_id")


def packed_path(model: ModelSource, description: Description, quantize: str | None) -> Path:
    """Returns the place of a model's packed weights.

    The name has two digests. The first is of the place of the model's own files, and the quantization. The second is of
    everything that determines the weights: these files, the config, the description, the code and the quantization.
    """
    parts = (model.stamp, asdict(description), _code_stamp(CODE), quantize)
    return _path([source_of(model), quantize], parts)


def drafter_path(drafter: Path, files: Sequence[str], backbone: Path, part: str) -> Path:
    """Returns the place of a packed part of a drafter; the file's name has two digests, too.

    drafter: its folder. files: the stamps of the drafter's files. backbone: the file of its model's packed weights;
    the drafter may read the model's lm_head.
    """
    parts = (files, backbone.name, part, _code_stamp(DRAFTER_CODE))
    return _path([str(drafter), backbone.name.partition("-")[0], part], parts)


def _path(owner: Any, parts: Any) -> Path:
    return home() / "packed" / f"{_stamp(owner)[:12]}-{_stamp(parts)[:24]}.bin"


def source_of(model: ModelSource) -> str:
    """Returns the place of a model's weights: the path of the first file."""
    return str(model.weights[0].resolve())


@cache
def _code_stamp(code: tuple[str, ...]) -> str:
    """Returns a digest of the code that reads and packs weights, and of the versions of the packages it uses."""
    package = Path(__file__).parent.parent
    files = [path for name in code for path in sorted(package.glob(name))]
    digests = [sha256(path.read_bytes()).hexdigest() for path in files]
    return _stamp([*digests, *(version(name) for name in PACKAGES)])


def _stamp(parts: Any) -> str:
    return sha256(json.dumps(parts, default=str).encode()).hexdigest()


def is_checked(path: Path) -> bool:
    """Returns True if the digests of a file were checked since it was last changed, and since the machine started."""
    with suppress(OSError):
        return _mark(path).read_text() == _state(path)
    return False


def note_checked(path: Path) -> None:
    """Records that the digests of a file have been checked; without a record, they are checked again."""
    with suppress(OSError):
        _mark(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_mark(path), _state(path))


def forget(path: Path) -> None:
    """Removes a file of packed weights, if the cache can be written."""
    for own in (path, _mark(path)):
        with suppress(OSError):
            own.unlink(missing_ok=True)


def forget_outdated(path: Path, sources: Iterable[tuple[Path, str | None]]) -> None:
    """Removes the files that the new file at `path` replaces, and the files whose model is gone.

    sources: the files of packed weights, each with the place of its model's weights, or with None for damaged files and
    files of earlier versions.
    """
    owner = path.name.partition("-")[0]
    for other, source in sources:
        is_gone = source is None or not Path(source).exists()
        if other != path and (is_gone or other.name.partition("-")[0] == owner):
            forget(other)


def _mark(path: Path) -> Path:
    return home() / "checked" / f"{path.stem}.txt"


def _state(path: Path) -> str:
    """Returns a text that changes whenever a file is written, or the machine starts."""
    stat = path.stat()
    if BOOT.is_file():
        boot = BOOT.read_text().strip()
    else:
        # macOS reports the start in seconds, then microseconds.
        boot = (sysctl("kern.boottime") or b"")[:8].hex()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {boot}\n"
