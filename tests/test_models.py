"""Models of every kind of layer decode as their own `generate`, or are refused, as docs/models.md says of each type."""

import re
from pathlib import Path

import pytest

from tests.models import NAMED, page, survey

PAGE = Path(__file__).parent.parent / "docs/models.md"
ROWS = {
    kind: row
    for row, kind in re.findall(
        r"^(\| `([^`]+)` .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
}
EVERY = [kind for of_group in NAMED.values() for kind in of_group]


@pytest.mark.quick("hrm_text", "llama4_text", "paligemma")
@pytest.mark.parametrize("kind", EVERY)
def test_type_runs_as_the_page_says(kind: str) -> None:
    outcome = survey(kind)
    assert not outcome.wrong
    assert outcome.row(kind) == ROWS[kind], "run `make models-page`"


def test_page_lists_the_named_types_of_which_most_run() -> None:
    assert page(ROWS) == PAGE.read_text(encoding="utf-8"), "run `make models-page`"
    refused = [kind for kind in EVERY if "| refused |" in ROWS[kind]]
    assert len(EVERY) - len(refused) >= 100
