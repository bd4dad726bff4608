"""Reads a corpus (a run's answers, chat logs, text, code), and keeps its index."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from medusa_cli.assets import home
from medusa_cli.data.conversation import conversation_of, messages_of
from medusa_cli.decode.ngram import GAP, Corpus
from medusa_cli.errors import UserError
from medusa_cli.model import Backbone
from medusa_cli.model.chat_template import token_ids
from medusa_cli.runs.io import Malformed, read_json, read_jsonl, replacing
from medusa_cli.runs.run import RUNS, Run

# Most tokens of a corpus, 8 bytes each in its index.
MAX_CORPUS = 1 << 25
# Characters of a text that are tokenised at once.
CHUNK = 1 << 20
log = logging.getLogger(__name__)


def load_corpus(source: str, backbone: Backbone) -> Corpus:
    """Returns the index of a run's answers, a file or a folder.

    The index is made once per content and tokenizer. It lies in the cache and is mapped into
    memory, not read. Raises UserError for a source without text.
    """
    files = _files(source)
    tokenizer = getattr(backbone.tokenizer, "backend_tokenizer", None)
    words = None if tokenizer is None else tokenizer.to_str()
    if words is None:
        words = repr(sorted(backbone.tokenizer.get_vocab().items()))
    template = getattr(backbone.tokenizer, "chat_template", None)
    reader = hashlib.sha256(f"{words}{template}".encode()).hexdigest()
    content = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while part := stream.read(CHUNK):
                content.update(part)
        content.update(str(file.stat().st_size).encode())  # where one file ends and the next begins
    name = hashlib.sha256(f"{reader}{files[0].absolute()}".encode()).hexdigest()[:16]
    path = home() / "corpora" / f"{name}-{content.hexdigest()[:16]}.npy"
    corpus = _read_index(path, backbone.vocab_size)
    if corpus is None:
        log.info(f"indexing the corpus {source}, once for its content")
        texts = chain.from_iterable(_texts(file, backbone) for file in files)
        corpus = Corpus(_limited(texts, source))
        if not len(corpus):
            raise UserError(
                f"@corpus {source!r} holds no text",
                "give a run that has distilled, a file or a folder",
            )
        with suppress(OSError):  # a cache that cannot be written only costs time
            _write_index(path, name, corpus)
    return corpus


def _files(source: str) -> list[Path]:
    """Returns the files of a corpus in order; raises UserError where there are none."""
    path = Path(source).expanduser()
    run = Run(RUNS / source).distill_path
    if path.is_file():
        return [path]
    for answers in (Run(path).distill_path, run):
        if answers.is_file():
            return [answers]
    if not path.is_dir():
        raise UserError(f"@corpus {source!r} is not a file, a folder or a run with answers", "check the path")
    files = []
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            files.append(file)
    if not files:
        raise UserError(f"@corpus {source!r} is an empty folder", "give one with text files")
    return files


def _texts(file: Path, backbone: Backbone) -> Iterator[list[int]]:
    """Yields the token ids of a file's conversations, or of its text; nothing of a binary file."""
    conversations = 0
    for record in _records(file) if file.suffix in (".json", ".jsonl") else ():
        with suppress(Malformed):
            yield _conversation(record, backbone)
            conversations += 1
    with file.open("rb") as head:
        if conversations or b"\0" in head.read(8192):
            return
    with file.open(encoding="utf-8", errors="replace") as stream:
        while text := stream.read(CHUNK):
            yield token_ids(backbone, text)


def _records(file: Path) -> Iterable[Any]:
    with suppress(UserError):  # a saved chat is one JSON object over many lines
        if isinstance(document := read_json(file), dict):
            return [document]
    return read_jsonl(file, array=True)


def _conversation(record: Any, backbone: Backbone) -> list[int]:
    """Returns the token ids of a conversation; raises Malformed for anything else."""
    if not isinstance(record, dict):
        raise Malformed("not an object")
    if "tokens" in record:
        return conversation_of(record, backbone).tokens
    messages = messages_of(record)
    if getattr(backbone.tokenizer, "chat_template", None):
        return backbone.encode_chat(messages)
    return token_ids(backbone, "\n\n".join(message["content"] for message in messages))


def _limited(texts: Iterable[list[int]], source: str) -> Iterator[list[int]]:
    """Yields texts up to MAX_CORPUS tokens; warns if there are more."""
    left = MAX_CORPUS
    for text in texts:
        if len(text) > left:
            log.warning(f"the corpus {source} has more than {MAX_CORPUS:,} tokens: the rest is left out")
            return
        left -= len(text)
        yield text


def _read_index(path: Path, vocab_size: int) -> Corpus | None:
    """Returns the corpus of a kept index; None without one, and for a damaged one."""
    try:
        table = np.load(path, mmap_mode="r")
        tokens = np.asarray(table[0])
        positions = np.asarray(table[1])
        whole = table.dtype == np.int32 and table.shape == (2, len(tokens))
        whole = whole and tokens.min() >= GAP and tokens.max() < vocab_size
        whole = whole and positions.min() >= 0 and positions.max() < len(tokens)
    except (OSError, ValueError, IndexError, EOFError):
        return None
    corpus = Corpus()
    corpus.tokens = tokens
    corpus.positions = positions
    return corpus if whole else None


def _write_index(path: Path, name: str, corpus: Corpus) -> None:
    """Keeps an index and deletes those of earlier contents."""
    with replacing(path) as part, part.open("wb") as stream:
        np.save(stream, np.stack([corpus.tokens, corpus.positions]))
    for other in path.parent.glob(f"{name}-*"):
        if other != path:
            other.unlink(missing_ok=True)
