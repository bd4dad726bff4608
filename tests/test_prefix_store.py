"""Cached prefixes on disk: they come back after a restart with the same bits, and damaged files do no harm."""

import json
import os
import random
import shutil
import stat
import struct
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_cli.decode import Decoder, Request, Step, prefix_store
from medusa_cli.decode.prefix_file import MAGIC
from medusa_cli.decode.prefix_store import PrefixStore
from medusa_cli.errors import UsageError
from medusa_cli.model import Backbone
from medusa_cli.native import is_available
from tests.fuzz_answers import BLOCK, fuzz, small_blocks
from tests.helpers import SPARSE, attach, decoder_of, tiny_backbone, tiny_tokenizer, tokens_of
from tests.models import tiny_network
from tests.test_drafters import drafter_of
from tests.test_prefix_cache import counting

pytestmark = pytest.mark.skipif(not is_available(), reason="the native library is not compiled")

TEXT = torch.randint(5, 60, (400,), generator=torch.Generator().manual_seed(3)).tolist()
GIGABYTE = 10**9


@pytest.fixture(autouse=True)
def with_small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def backbone_of(model: str) -> Backbone:
    backbone = Backbone(tiny_network(model), tiny_tokenizer(128))
    attach(backbone, "native")
    return backbone


def store_of(folder: Path, backbone: Backbone, limit: int = GIGABYTE) -> Any:
    return PrefixStore(folder, limit, backbone)


def run(decoder: Decoder, prompt: list[int], **rules: Any) -> tuple[list[int], list[Any], int]:
    """Returns an answer's tokens, its log probabilities, and the number of prompt tokens reused."""
    sequence, first = decoder.admit(Request(prompt, 12, stop_ids=(), top=3, **rules))
    steps: list[Step] = [first]
    while not sequence.done:
        steps += [step for _, step in decoder.step()]
    return tokens_of(steps), [own for step in steps for own in step.likelihoods], sequence.reused


@pytest.mark.quick("llama-None")
@pytest.mark.parametrize("kind", [None, "medusa", "eagle-draft", "amphista-prompt"])
@pytest.mark.parametrize("model", ["llama", "qwen3_5_text", "lfm2", "qwen3_moe"])
def test_answers_after_a_restart_have_the_same_bits(
    model: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of(model)
    drafter = None if kind is None else drafter_of(backbone, kind)
    tree = None if drafter is None else SPARSE.truncate(3)
    first = decoder_of(backbone, drafter, tree, slots=2, store=store_of(tmp_path, backbone))
    prompt = TEXT[:150]
    answer, _, _ = run(first, prompt)
    first.prefixes.save()
    later = [*prompt, *answer, 7, 8, 9]
    expected = run(decoder_of(backbone, drafter, tree), later)

    rows = counting(backbone, monkeypatch)
    again = store_of(tmp_path, backbone)
    rows.clear()
    decoder = decoder_of(backbone, drafter, tree, slots=2, store=again)
    tokens, likelihoods, reused = run(decoder, later)
    assert rows[0] <= 5
    assert reused >= len(later) - 5
    assert tokens == expected[0]
    assert likelihoods == expected[1]


def stored(backbone: Backbone, folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """Stores the text of a prompt and its answer; returns the answer."""
    decoder = decoder_of(backbone, store=store_of(folder, backbone), **options)
    tokens, _, _ = run(decoder, prompt)
    decoder.prefixes.save()
    return tokens


def fresh(backbone: Backbone, folder: Path, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the answer after a restart, and the number of prompt tokens that were reused."""
    tokens, _, reused = run(decoder_of(backbone, store=store_of(folder, backbone)), prompt)
    return tokens, reused


def test_a_text_that_parts_within_a_block_is_reused_up_to_there(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[:150])
    for common in (30, 64, 100, 140):
        prompt = [*TEXT[:common], 61, 62, 63, *TEXT[:50]]
        expected = run(decoder_of(backbone), prompt)[0]
        assert fresh(backbone, tmp_path, prompt) == (expected, common)


def test_running_states_come_back_after_the_prompt_and_after_the_answer(tmp_path: Path) -> None:
    backbone = backbone_of("qwen3_5_text")
    answer = stored(backbone, tmp_path, TEXT[:150])
    for prompt, reused in (
        ([*TEXT[:150], *answer, 7], 161),  # the last token of the answer was not run
        ([*TEXT[:150], 7, *answer], 150),
        ([*TEXT[:149], 7, *answer], 0),
    ):
        expected = run(decoder_of(backbone), prompt)[0]
        assert fresh(backbone, tmp_path, prompt) == (expected, reused)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("model", ["llama", "qwen3_5_text"])
def test_a_killed_server_has_written_the_blocks_of_long_prompts(model: str, tmp_path: Path) -> None:
    backbone = backbone_of(model)
    drafter = drafter_of(backbone, "eagle-draft")
    store = store_of(tmp_path, backbone)
    decoder = decoder_of(backbone, drafter, SPARSE.truncate(3), store=store)
    decoder.admit(Request(TEXT[:200], 50, stop_ids=()))
    for _ in range(6):
        decoder.step()
        decoder.prefixes.store_next()
    store.finish()
    assert len(list(tmp_path.iterdir())) == 3 + (model != "llama")
    _, reused = fresh(backbone, tmp_path, TEXT[:250])
    assert reused == (192 if model == "llama" else 200)


def test_other_sequences_take_steps_while_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[:300])
    store = store_of(tmp_path, backbone)
    decoder = decoder_of(backbone, store=store, slots=3)
    running, _ = decoder.admit(Request([9, 8, 7], 40, stop_ids=()))
    gate = threading.Event()
    inner = store._read
    monkeypatch.setattr(store, "_read", lambda segment: (gate.wait(20), inner(segment))[1])
    pieces = decoder.prefill(Request(TEXT[:310], 5, stop_ids=()))
    for _ in range(10):
        sequence, step = next(pieces)
        assert step is None
        assert not sequence.tokens
        decoder.step()
    assert len(running.tokens) > 10
    gate.set()
    # Slots move in between.
    running.cancel()
    *_, (sequence, step) = pieces
    assert sequence.reused == sequence.restored >= 300
    expected = run(decoder_of(backbone), TEXT[:310])[0]
    tokens = list(step.tokens) if step else []
    while not sequence.done:
        tokens += [token for _, later in decoder.step() for token in later.tokens]
    assert tokens == expected[:5]


@pytest.mark.quick("llama")
@pytest.mark.parametrize("model", ["llama", "qwen3_5_text"])
def test_a_request_that_ends_while_its_prefix_is_read_leaves_a_usable_slot(
    model: str, tmp_path: Path
) -> None:
    backbone = backbone_of(model)
    stored(backbone, tmp_path, TEXT[:300])
    expected = run(decoder_of(backbone), TEXT[:310])[0]
    for parts in (1, 2, 3, 5):
        decoder = decoder_of(backbone, store=store_of(tmp_path, backbone))
        pieces = decoder.prefill(Request(TEXT[:310], 5, stop_ids=()))
        for _ in range(parts):
            next(pieces)
        pieces.close()
        assert run(decoder, TEXT[:310])[0] == expected


def test_a_file_that_vanishes_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[:200])
    expected = run(decoder_of(backbone), TEXT[:210])[0]
    store = store_of(tmp_path, backbone)
    inner = store._read

    def vanishing(segment: Any) -> Any:
        if segment.start == BLOCK:
            (tmp_path / segment.name).unlink()
        return inner(segment)

    monkeypatch.setattr(store, "_read", vanishing)
    tokens, _, reused = run(decoder_of(backbone, store=store), TEXT[:210])
    assert tokens == expected
    assert reused == BLOCK


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    folder = tmp_path / "store"
    decoder = decoder_of(backbone, store=store_of(folder, backbone))
    shutil.rmtree(folder)
    tokens, _, _ = run(decoder, TEXT[:150])
    assert tokens == run(decoder_of(backbone), TEXT[:150])[0]
    decoder.prefixes.save()
    assert fresh(backbone, folder, TEXT[:151])[1] == 150


@pytest.mark.slow
def test_files_of_other_weights_and_number_types_are_not_used(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[:150])
    other = backbone_of("llama")
    attach(other, "native", quantize="int8")
    assert fresh(other, tmp_path, TEXT[:150])[1] == 0
    network = tiny_network("llama")
    with torch.no_grad():
        network.get_output_embeddings().weight[5] += 1
    changed = Backbone(network, tiny_tokenizer(128))
    attach(changed, "native")
    assert fresh(changed, tmp_path, TEXT[:150])[1] == 0
    assert fresh(backbone, tmp_path, TEXT[:150])[1] == 149
    # The folder of the model, or of its unpacked config, is not what it is.
    backbone.config._name_or_path = "/elsewhere"
    assert fresh(backbone, tmp_path, TEXT[:150])[1] == 149


def test_the_least_recently_used_files_are_removed_ends_first(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[: BLOCK * 3])
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    for file in tmp_path.iterdir():
        old = file.stat().st_mtime_ns - 10**12
        os.utime(file, ns=(old, old + file.stat().st_mtime_ns % 10**9))
    other = TEXT[::-1][: BLOCK * 3]
    assert fresh(backbone, tmp_path, [*TEXT[: BLOCK * 2], 7])[1] == BLOCK * 2
    limited = store_of(tmp_path, backbone, limit=int(1.8 * size))
    decoder = decoder_of(backbone, store=limited)
    run(decoder, other)
    decoder.prefixes.save()
    left = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert 0.8 * size < left <= 1.8 * size
    assert fresh(backbone, tmp_path, [*other, 7])[1] == BLOCK * 3
    # Its last block was used longest ago.
    assert 0 < fresh(backbone, tmp_path, [*TEXT[: BLOCK * 3], 7])[1] <= BLOCK * 2


def forged(data: bytes, chance: random.Random) -> bytes:
    """Returns a file's content with another header or other tokens, and the digest of that."""
    size = struct.unpack_from("<16sI", data)[1]
    begin = 20 + size
    header = json.loads(data[20:begin])
    begin += 4 * header["tokens"]
    ids = data[20 + size : begin]
    arrays = data[begin + -begin % 64 : -32]
    kinds = header[chance.choice(("rows", "states"))]
    kind = chance.choice([*header["rows"], *header["states"]])
    change = chance.randrange(7)
    if change == 0:
        header["tokens"] = chance.choice((0, -1, 1, BLOCK + 1, 1 << 16, 1 << 40, 1 << 70))
    elif change == 1:
        header["parent"] = chance.choice(("", "x" * 32, "0" * 32, "\n" * 9))
    elif change == 2:
        kind[0] = chance.choice(("float16", "float64", "uint8", "bfloat16", "x\n" * 99, ""))
    elif change == 3:
        place = chance.randrange(len(kind[1]))
        kind[1][place] = chance.choice((0, 1, -1, 1 << 40, 1 << 62, kind[1][place] + 16))
    elif change == 4:
        # An array without numbers, and of impossible sizes.
        kinds.append(["float32", [0, *[1 << 40] * chance.randrange(9)]])
    elif change == 5:
        kind[1][:] = kind[1][::-1]
    else:
        ids = chance.randbytes(len(ids))
    text = json.dumps(header).encode()
    begin_of = MAGIC + struct.pack("<I", len(text)) + text + ids
    whole = begin_of + bytes(-len(begin_of) % 64) + arrays
    return whole + sha256(whole).digest()


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns a file's content with one of several kinds of damage, without a digest of that."""
    at = chance.randrange(len(data))
    kind = chance.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data + bytes(at)
    if kind == 3:
        return chance.randbytes(len(data))
    size = struct.unpack_from("<16sI", data)[1]
    if kind == 4:
        header = bytearray(data[20 : 20 + size])
        place = chance.randrange(size)
        header[place : place + 1] = chance.choice([b"9", b"-", b"[[", b'"', b"\xff"])
        return data[:16] + struct.pack("<I", len(header)) + bytes(header) + data[20 + size :]
    if kind == 5:
        older = b"MEDUSA-PREFIX-1\n" + data[16:-32]
        return older + sha256(older).digest()
    return MAGIC + struct.pack("<I", chance.choice([0, 1, 1 << 16, 1 << 31])) + data[20:]


def spoil(file: Path, others: list[bytes], chance: random.Random) -> None:
    """Puts damage, a forgery, another file, or what is no file in the place of a file."""
    data = file.read_bytes()
    kind = chance.randrange(8)
    if kind < 3:
        file.write_bytes(damaged(data, chance))
    elif kind < 5:
        file.write_bytes(forged(data, chance))
    elif kind == 5:
        file.write_bytes(chance.choice(others))
    else:
        file.unlink()
        (file.parent / "elsewhere").write_bytes(data)
        makes = (
            Path.mkdir,
            os.mkfifo,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to(file.parent / "elsewhere"),
        )
        chance.choice(makes)(file)


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["llama", "qwen3_5_text"])
def test_damaged_and_hostile_files_do_no_harm(
    model: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backbone = backbone_of(model)
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    stored(backbone, folder, TEXT[:150])
    stored(backbone_of("lfm2" if model == "llama" else "llama"), elsewhere, TEXT[:150])
    expected = run(decoder_of(backbone), TEXT[:160])
    whole = {file: file.read_bytes() for file in sorted(folder.iterdir())}
    others = [b"", *whole.values(), *(file.read_bytes() for file in elsewhere.iterdir())]
    store = store_of(folder, backbone)
    chance = random.Random(5)
    handles = len(os.listdir("/proc/self/fd"))
    restored = 0
    for _ in range(count):
        shutil.rmtree(folder)
        folder.mkdir()
        for file, data in whole.items():
            file.write_bytes(data)
        file = chance.choice(list(whole))
        spoil(file, others, chance)
        caplog.clear()
        tokens, likelihoods, reused = run(decoder_of(backbone, store=store), TEXT[:160])
        assert (tokens, likelihoods) == expected[:2]
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) <= 1
        assert not any("\n" in line for line in lines)
        restored += reused > 0
    assert 0 < restored < count
    assert len(os.listdir("/proc/self/fd")) <= handles + 2


def test_rows_that_do_not_fit_the_cache_are_dropped(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    stored(backbone, tmp_path, TEXT[:150])
    expected = run(decoder_of(backbone), TEXT[:160])[0]
    store = store_of(tmp_path, backbone)
    [segment, *_] = store.find(TEXT[:160], 0, False).result()
    rows = store.read(segment).result()
    for parts in (
        rows.rows[:-1],
        [rows.rows[0][:, :1], *rows.rows[1:]],
        [*rows.rows[:-1], rows.rows[0]],
    ):
        forged = prefix_store.Rows(BLOCK, [part.clone() for part in parts])
        store.write(segment, forged)
        store.finish()
        tokens, _, reused = run(decoder_of(backbone, store=store), TEXT[:160])
        assert tokens == expected
        assert reused == 0
        assert not (tmp_path / segment.name).exists()


def test_random_requests_are_answered_as_by_plain_decoding() -> None:
    counts, faults = fuzz(number=7, answers=60)
    assert not faults
    assert counts["answers"] >= 60
    assert counts["tokens from drafts"]
    assert counts["tokens from files"]
    assert counts["cancelled"]


def test_a_store_needs_a_folder_and_exact_rows(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    store_of(tmp_path / "new" / "store", backbone)
    assert stat.S_IMODE((tmp_path / "new" / "store").stat().st_mode) & 0o077 == 0
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="prefix_store"):
            store_of(folder, backbone)
    with pytest.raises(UsageError, match="native"):
        store_of(tmp_path, tiny_backbone(engine="eager"))
