"""Packed drafters: the matrices of a drafter's parts, rounded and packed once and kept in files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from medusa_cli.engine.packed import keep_packed, read_kept, read_parts
from medusa_cli.engine.packed_cache import drafter_path
from medusa_cli.files.model_source import file_stamp
from medusa_cli.native import PackedMatrix, drafting_matrix
from medusa_cli.native.matrix import Parts


@dataclass(frozen=True)
class PackedDrafter:
    """Packs the parts of the drafter in a folder, or reads them from the cache.

    files: the stamps of the drafter's files, taken before they were read. backbone: the file of its
    model's packed weights.
    """

    folder: Path
    files: Sequence[str]
    backbone: Path

    @classmethod
    def of(cls, folder: Path, backbone: Path) -> "PackedDrafter":
        """Returns the drafter whose files are in the folder now."""
        files = [file_stamp(path) for path in sorted(folder.iterdir()) if path.is_file()]
        return cls(folder.resolve(), files, backbone)

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[Parts], PackedMatrix]]:
        """Yields a function that packs the next matrix of a part, or returns the matrix that was kept.

        New matrices are kept at the end of the block, unless the cache cannot be written.
        """
        path = drafter_path(self.folder, self.files, self.backbone, name)
        kept = read_kept(str(self.folder), lambda: read_parts(path, lambda _: True))
        if kept is not None:
            matrices = iter(kept.matrices.values())
            yield lambda parts: next(matrices)
            return

        packed: list[PackedMatrix] = []

        def pack(parts: Parts) -> PackedMatrix:
            packed.append(drafting_matrix(parts))
            return packed[-1]

        yield pack
        if not packed:
            return
        numbered = ((f"{number}", matrix) for number, matrix in enumerate(packed))
        with suppress(OSError):
            keep_packed(path, numbered, (), str(self.folder))
