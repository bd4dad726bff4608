"""Whatever fits the server's own OpenAPI description, or does not, is answered as the description says."""

from collections.abc import Iterator

import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, settings  # noqa: E402

from medusa_cli.api import Medusa  # noqa: E402
from tests.runs import save_model  # noqa: E402
from tests.serving import Served, serving  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    medusa = Medusa.from_pretrained(save_model(tmp_path_factory.mktemp("fuzz") / "model"), drafter=None, dtype="fp32")
    with serving(medusa, max_new_tokens=8) as found:
        yield found


@pytest.fixture
def api(server: Served) -> object:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_breaks_the_server(case: object) -> None:
    case.call_and_validate(excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")])  # type: ignore[attr-defined]


def test_it_is_still_there(server: Served) -> None:
    assert server.ask("GET", "/health")[0] == 200
