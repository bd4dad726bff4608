"""Verified descriptions of models, kept so that a later start need not build a transformers network."""

import json
import logging
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medusa_cli.engine.description import Description
from medusa_cli.engine.probes import rotary_of
from medusa_cli.engine.twin import verified
from medusa_cli.files.io import write_atomic
from medusa_cli.files.model_source import ModelSource, file_stamp
from medusa_cli.files.paths import home
from medusa_cli.model.backbone import LazyNetwork, text_config, usable_positions
from medusa_cli.native.library import LIBRARY, instruction_set

# Rotary tables are kept for this many positions; for longer texts, the network is built.
POSITIONS = 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedDescription:
    """A model's verified description and its rotary tables by kind: cosines and sines [positions, D]."""

    description: Description
    tables: dict[str, tuple[Tensor, Tensor]]

    def rotary(self, lazy: LazyNetwork, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines [1, n, D] of layers of a kind for positions [1, n], which count from 0.

        lazy: the network, which is built only if there are more positions than the tables have.
        """
        count = positions.shape[1]
        cos, sin = self.tables[kind]
        if count > len(cos):
            return rotary_of(lazy.network)(positions, kind)
        return cos[None, :count], sin[None, :count]


def describe_once(model: ModelSource, lazy: LazyNetwork) -> CachedDescription:
    """Returns the verified description of a model; the first call verifies its network and keeps the result.

    Raises Unsupported as `verified` does.
    """
    path = home() / "descriptions" / f"{_stamp(model)}.safetensors"
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, SafetensorError):  # missing or damaged
        pass
    description = _verify(lazy)
    try:
        _write(path, description)
    except OSError as reason:
        log.warning("%s cannot be kept: %s", path, reason.strerror)
    return description


def _verify(lazy: LazyNetwork) -> CachedDescription:
    description = verified(lazy.network)
    rotary = rotary_of(lazy.network)
    # Beyond the model's context, some tables change with the length of the text.
    positions = torch.arange(min(POSITIONS, usable_positions(text_config(lazy.config))))[None]
    tables = {}
    for kind in description.tables:
        cos, sin = rotary(positions, kind)
        tables[kind] = (cos[0].contiguous(), sin[0].contiguous())
    return CachedDescription(description, tables)


def _stamp(model: ModelSource) -> str:
    """Returns a digest of everything that a description depends on.

    The digest covers the model's files, the engines' code, transformers, the library and the CPU.
    """
    package = Path(__file__).parent.parent
    rooms = (package / room for room in ("engine", "model", "native", "files"))
    code = sha256()
    for path in sorted(path for room in rooms for path in room.glob("*.py")):
        code.update(path.read_bytes())
    parts = [
        model.stamp,
        transformers.__version__,
        torch.__version__,
        code.hexdigest(),
        file_stamp(LIBRARY),
        instruction_set(),
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _write(path: Path, cached: CachedDescription) -> None:
    tensors: dict[str, Tensor] = {}
    for kind, (cos, sin) in cached.tables.items():
        tensors |= {f"{kind}.cos": cos, f"{kind}.sin": sin}
    text = json.dumps(asdict(cached.description))
    metadata = {"description": text, "digest": _digest(text)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors, metadata))


def _read(path: Path) -> CachedDescription:
    """Reads a kept description; raises OSError, ValueError, KeyError or SafetensorError if it is damaged."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if _digest(metadata["description"]) != metadata["digest"]:
            raise ValueError("it is damaged")
        description = msgspec.json.decode(metadata["description"], type=Description)
        tables = {
            kind: (file.get_tensor(f"{kind}.cos"), file.get_tensor(f"{kind}.sin"))
            for kind in description.tables
        }
    return CachedDescription(description, tables)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
