"""A short fuzzing of every file that the program reads and of every command's flags; `make fuzz` is the long one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzzing import COMMANDS, FILES, Ground, cases
from tests.helpers import medusa

EXAMPLES = 2


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_HOME", "")  # put back at the end
        yield Ground(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", [*FILES, *COMMANDS])
def test_whatever_is_read_ends_in_a_result_or_in_one_message(
    ground: Ground, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ground.home.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def fuzzed(data: st.DataObject) -> None:
        ground.check(data.draw(cases(ground, name)))

    fuzzed()


def test_what_is_whole_is_taken(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ground itself is sound: unchanged files give results, or the fuzzing would find faults in its own setting."""

    monkeypatch.chdir(Path(ground.home).parent)
    for name in ("run/run.json", "joint/adapter/adapter_config.json", "run/calibration.json", "run/distill.jsonl"):
        assert medusa(*ground.filled(FILES[name])).exit_code == 0, name
