"""Cached prefixes on disk: rows of texts in files of BLOCK tokens, each named by a digest of the text up to its end."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medusa_cli.decode.ngram import shared_length
from medusa_cli.decode.prefix_file import Rows, opened, read, read_ids, write
from medusa_cli.engine import Plan
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone

# The number of tokens in a full file. The last file of a text, its tail, has fewer.
BLOCK = 512
# Texts of fewer than MIN_TOKENS tokens are not stored. A file that would save fewer than MIN_GAIN
# tokens is not read.
MIN_TOKENS = 256
MIN_GAIN = 64
# If more bytes than this wait to be written, nothing more is copied for the store.
MAX_PENDING = 256 << 20
# The number of tokens that are run to measure the size of a row, and to put the model's results into the digest `root`.
PROBE = 16
NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.prefix")
REMEDY = "give another folder, or leave it out"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Describes the tokens `ids` of a text that are in one file.

    chain: the root, and the key of the text after each block before `ids`. name: the file's name; the
    file may have more tokens.
    """

    chain: tuple[str, ...]
    start: int
    ids: tuple[int, ...]
    name: str

    @classmethod
    def of(cls, chain: tuple[str, ...], start: int, ids: Sequence[int]) -> Segment:
        """Returns the segment with all tokens of its file."""
        return cls(chain, start, tuple(ids), _name(chain[-1], key_of(chain[-1], ids)))

    @property
    def key(self) -> str:
        return self.name[33:65]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def names(self) -> list[str]:
        """Returns the names of the segment's file and of the text's earlier files, the latest first."""
        before = zip(self.chain[:-1], self.chain[1:], strict=True)
        return [self.name, *[_name(parent, key) for parent, key in before][::-1]]


def key_of(parent: str, ids: Sequence[int]) -> str:
    """Returns the digest of a text that ends with the tokens `ids`. `parent`: the digest of the text before them."""
    return sha256(parent.encode() + np.array(ids, "<i4").tobytes()).hexdigest()[:32]


def _name(parent: str, key: str) -> str:
    return f"{parent}-{key}.prefix"


class PrefixStore:
    """Keeps cached prefixes in a folder, which several servers may share.

    The first key of a text is a digest of everything that determines the bits of its rows, so files
    of other models are not read. One thread reads files, and another thread writes them. If all
    files together have more than `limit` bytes, the least recently used are removed.
    """

    def __init__(self, folder: Path, limit: int, backbone: Backbone) -> None:
        """Creates the folder; raises UsageError if it cannot be written, or if the bits of rows depend on the pass."""
        if not backbone.engine.prompt_invariant:
            fault = f"@prefix_store needs the native engine, and the {backbone.engine.name} engine runs {backbone.id!r}"
            raise UsageError(fault, "leave it out, or use @engine native")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            next(os.scandir(folder), None)
        except OSError as reason:
            raise UsageError(f"@prefix_store {folder}: {reason.strerror}", REMEDY) from reason
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"@prefix_store {folder} cannot be written", REMEDY)
        self.folder = folder
        self.limit = limit
        self.block = BLOCK
        self._probe(backbone)
        self._reader = ThreadPoolExecutor(1, "prefix-reader")
        self._writer = ThreadPoolExecutor(1, "prefix-writer")
        # The bytes that wait to be written, by file.
        self._pending: dict[str, int] = {}
        self._lock = threading.Lock()

    @torch.inference_mode()
    def _probe(self, backbone: Backbone) -> None:
        """Runs a few tokens to find the maximum size of a file, and `root`, the digest of the model and its results."""
        tokens = torch.arange(1, PROBE + 1) * 7919 % backbone.vocab_size
        cache = backbone.engine.new_cache()
        out = backbone.engine.forward(Plan.chain(tokens, logits="last"), cache)
        states = cache.states_after(0, PROBE) or []
        rows = cache.rows(0, 0, PROBE)
        # The path of the model's files, and the transformers version that wrote them, change no bits.
        config = {**backbone.config.to_dict(), "_name_or_path": "", "transformers_version": ""}
        text = json.dumps(config, sort_keys=True, default=str)
        model = json.dumps([backbone.identity, backbone.engine.title, text], default=str)
        self.root = _digest(model, [*rows, *states, out.logits])
        per_token = sum(part.nbytes for part in rows) // PROBE
        # The last term leaves bytes for the header and for the padding of arrays.
        self._max_bytes = BLOCK * per_token + sum(state.nbytes for state in states) + (1 << 20)

    # Reading

    def find(self, prompt: Sequence[int], above: int, stateful: bool) -> Future[list[Segment]]:
        """Finds the segments that a prompt begins with, if they end at least MIN_GAIN tokens after `above`.

        above: a position in the prompt; segments up to there are left out. stateful: the last segment must
        have running states.
        """
        return self._reader.submit(self._find, tuple(prompt), above, stateful)

    def _find(self, prompt: tuple[int, ...], above: int, stateful: bool) -> list[Segment]:
        chain: tuple[str, ...] = (self.root,)
        blocks = list[Segment]()
        for start in range(0, len(prompt) - self.block + 1, self.block):
            segment = Segment.of(chain, start, prompt[start : start + self.block])
            if not (self.folder / segment.name).exists():
                break
            blocks.append(segment)
            chain = (*chain, segment.key)
        segments = self._with_tail(prompt, blocks, chain, stateful)
        if not segments or segments[-1].end < above + MIN_GAIN:
            return []
        self._touch(segments[-1])
        return [segment for segment in segments if segment.end > above]

    def _with_tail(
        self, prompt: tuple[int, ...], blocks: list[Segment], chain: tuple[str, ...], stateful: bool
    ) -> list[Segment]:
        """Returns the blocks and, after them, the segment that continues the prompt the furthest.

        If `stateful`, this segment is a whole file, and it may follow fewer blocks.
        """
        names = [match for match in map(NAME.fullmatch, self._names()) if match]
        for count in range(len(blocks), -1, -1):
            start = count * self.block
            keys = chain[: count + 1]
            tails = [
                Segment(keys, start, ids, match[0])
                for match in names
                if match[1] == keys[-1]
                and (ids := self._shared(match[0], prompt[start:], stateful)) is not None
            ]
            if tails:
                return [*blocks[:count], max(tails, key=lambda tail: tail.end)]
            if not stateful:
                return blocks
        return []

    def _shared(self, name: str, rest: tuple[int, ...], stateful: bool) -> tuple[int, ...] | None:
        """Returns the tokens that a file shares with the rest of a prompt; None if the prompt cannot use the file."""
        try:
            with opened(self.folder / name, self._max_bytes) as file:
                header, ids = read_ids(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as reason:
            self._drop(name, reason)
            return None
        shared = shared_length(ids, rest)
        useful = shared == len(ids) and header.states if stateful else shared
        return ids[:shared] if useful else None

    def read(self, segment: Segment) -> Future[Rows | None]:
        """Reads all rows of a segment's file. If the file is damaged, the result is None, and the file is removed."""
        return self._reader.submit(self._read, segment)

    def _read(self, segment: Segment) -> Rows | None:
        try:
            header, ids, rows = read(self.folder / segment.name, self._max_bytes)
            if header.parent != segment.chain[-1] or ids[: len(segment.ids)] != segment.ids:
                raise ValueError("it is another text's")
            if key_of(header.parent, ids) != segment.key:
                raise ValueError("its name is another text's")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as reason:
            self._drop(segment.name, reason)
            return None
        return rows

    def _drop(self, name: str, reason: Exception) -> None:
        """Removes a file that cannot be used."""
        log.warning("dropped the cached prefix %s: %s", self.folder / name, reason)
        with suppress(OSError):
            (self.folder / name).unlink()

    def drop(self, segment: Segment) -> None:
        """Removes a file whose rows do not fit the cache."""
        self._drop(segment.name, ValueError("its rows are another model's"))

    # Writing

    @property
    def busy(self) -> bool:
        """Returns True if too many bytes wait to be written, so that nothing more should be copied now."""
        with self._lock:
            return sum(self._pending.values()) > MAX_PENDING

    def has(self, segment: Segment) -> bool:
        """Returns True if a segment is in the folder or waits to be written."""
        return segment.name in self._pending or os.path.lexists(self.folder / segment.name)

    def write(self, segment: Segment, rows: Rows) -> None:
        """Writes a segment's rows in a thread. The rows must not change."""
        with self._lock:
            self._pending[segment.name] = rows.nbytes
        self._writer.submit(self._write, segment, rows)

    def _write(self, segment: Segment, rows: Rows) -> None:
        try:
            write(self.folder / segment.name, segment.chain[-1], segment.ids, rows)
            self._touch(segment)
            self._evict()
        except OSError as reason:
            log.warning("no cached prefix was written to %s: %s", self.folder, reason.strerror)
        except Exception:
            log.exception("no cached prefix was written to %s", self.folder)
        finally:
            with self._lock:
                del self._pending[segment.name]

    def _touch(self, segment: Segment) -> None:
        """Marks a text as used. Its first file becomes the newest, because later files cannot be used without it."""
        for name in segment.names:
            with suppress(OSError):
                os.utime(self.folder / name)

    def _evict(self) -> None:
        """Removes the least recently used files until all files together are within the limit."""
        files = list[tuple[int, int, str]]()
        for name in self._names():
            with suppress(OSError):
                status = os.stat(self.folder / name, follow_symlinks=False)
                files.append((status.st_mtime_ns, status.st_size, name))
        left = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if left <= self.limit:
                break
            with suppress(OSError):
                (self.folder / name).unlink()
            left -= size

    def _names(self) -> list[str]:
        """Returns the names of the cached prefixes in the folder, including those of other models."""
        try:
            with os.scandir(self.folder) as entries:
                return [entry.name for entry in entries if NAME.fullmatch(entry.name)]
        except OSError:  # the folder was removed; the next write creates it again
            return []

    def finish(self) -> None:
        """Waits until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Waits until everything is written, and ends the threads."""
        self._reader.shutdown()
        self._writer.shutdown()


def _digest(text: str, parts: Sequence[Tensor | None]) -> str:
    digest = sha256(text.encode())
    for part in parts:
        if part is not None:
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
