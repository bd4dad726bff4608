"""A short fuzzing of every file that the program reads and of every command's flags; `make fuzz` is the long one."""

from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import COMMANDS, EVERYTHING, FILES, KINDS, Ground, cases
from tests.helpers import medusa


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_HOME", "")  # put back at the end
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield Ground(tmp_path_factory.mktemp("fuzz"))


def test_unchanged_files_give_results(ground: Ground) -> None:
    for line in (
        COMMANDS["chat"],
        COMMANDS["tree"],
        COMMANDS["train"],
        *FILES["joint/adapter/adapter_config.json"],
    ):
        medusa(*ground.filled(line.split()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_or_flag_ends_in_a_result_or_one_message(ground: Ground, kind: str) -> None:
    @settings(
        max_examples=2,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=EVERYTHING,
    )
    @given(st.data())
    def fuzzed(data: st.DataObject) -> None:
        ground.check(data.draw(cases(ground, kind)))

    fuzzed()
