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


@pytest.mark.slow
def test_unchanged_files_give_results(ground: Ground) -> None:
    for line in (
        COMMANDS["chat"],
        COMMANDS["tree"],
        COMMANDS["train"],
        *FILES["joint/adapter/adapter_config.json"],
    ):
        medusa(*ground.filled(line.split()))


# Other files of the same readers, and other commands that read the same file.
REPEATED = (
    "run/checkpoint_best.pt#0", "joint/adapter/adapter_model.safetensors#0", "model/generation_config.json#0",
    "model/tokenizer_config.json#0", "seeds.json#0", "questions.jsonl#0",
    *(kind for kind in KINDS if kind.endswith(("#1", "#2"))),
)  # fmt: skip


@pytest.mark.quick(*(kind for kind in KINDS if kind not in REPEATED))
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
