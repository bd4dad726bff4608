"""The state store: bf16 rows survive exactly, and a torn end is dropped."""

import warnings
from pathlib import Path

import pytest
import torch

from medusa_cli.data.states import StateStore, read_rows
from medusa_cli.errors import UserError


def test_rows_come_back_in_bf16(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states.bin", 6)
    first, second = torch.randn(3, 6), torch.randn(2, 6, dtype=torch.bfloat16)
    assert store.append(first) == 0
    assert store.append(second) == 3
    assert store.rows == 5
    assert torch.equal(store.read(0, 3), first.bfloat16())
    assert torch.equal(store.read(3, 2), second)
    store.close()
    again = StateStore(tmp_path / "states.bin", 6)
    assert again.append(first) == 5
    assert torch.equal(again.read(4, 4), torch.cat([second[1:], first.bfloat16()]))
    again.close()


def test_a_torn_row_is_dropped_on_truncate(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    store = StateStore(path, 4)
    store.append(torch.ones(3, 4))
    store.close()
    with path.open("ab") as out:
        out.write(b"\x01\x02\x03")  # half a row, as after kill -9
    store = StateStore(path, 4)
    assert store.rows == 3
    store.truncate(2)
    assert store.append(torch.zeros(1, 4)) == 2
    assert torch.equal(store.read(0, 3), torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4]).bfloat16())
    store.close()


def test_a_file_that_is_renamed_meanwhile_keeps_its_rows(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states.bin", 4)
    store.append(torch.ones(3, 4))
    (tmp_path / "states.bin").rename(tmp_path / "other.bin")
    assert store.rows == 3
    store.close()


def test_reading_past_the_end_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "states.bin", 4)
    store.append(torch.ones(3, 4))
    with pytest.raises(UserError, match="states.bin ends before state row 4"):
        store.read(2, 2)
    store.close()


def test_rows_are_read_without_a_right_to_write_and_without_memory_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    path.write_bytes(torch.arange(12).bfloat16().view(torch.uint8).numpy().tobytes())
    path.chmod(0o400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = read_rows(path, 4, 1, 2)
    assert rows.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    maps = Path("/proc/self/maps")
    if maps.is_file():
        (mapped,) = [line for line in maps.read_text().splitlines() if line.endswith(f" {path}")]
        assert mapped.split()[1] == "r--s", "a private or writable mapping counts as memory in full"
    assert read_rows(path, 4, 3, 0).shape == (0, 4)
