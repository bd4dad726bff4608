"""Whatever fits the server's own OpenAPI description, or does not, is answered as the description says."""

from collections.abc import Iterator

import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from medusa_cli.api import Medusa  # noqa: E402
from tests.helpers import save_model  # noqa: E402
from tests.serving import Served, serving  # noqa: E402

# Not checked: that all that fits the description is answered (a token id may be beyond the vocabulary), and that all
# else is refused (null is taken for left out).
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    medusa = Medusa.from_pretrained(save_model(tmp_path_factory.mktemp("fuzz") / "model"), drafter=None, dtype="fp32")
    with serving(medusa, max_new_tokens=8) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/chat/completions", "positive"),
        ("/v1/chat/completions", "negative"),
        ("/v1/completions", "positive"),
        ("/v1/completions", "negative"),
        ("/v1/models", "positive"),
        ("/v1/models/{name}", "positive"),
        ("/health", "positive"),
    ],
)
def test_nothing_that_is_sent_breaks_the_server(server: Served, path: str, mode: str) -> None:
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in api.get_all_operations()]
    for operation in [one for one in found if one.path == path]:

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def holds(case: object) -> None:
            response = case.call()  # type: ignore[attr-defined]
            assert response.status_code < 500, response.text
            case.validate_response(response, checks=CHECKS)  # type: ignore[attr-defined]

        holds()


def test_it_is_still_there(server: Served) -> None:
    assert server.ask("GET", "/health")[0] == 200
