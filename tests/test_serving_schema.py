"""Random requests made from the server's own OpenAPI schema get answers that fit it."""

from collections.abc import Iterator
from typing import Any

import pytest

from medusa_cli.api import Medusa
from tests.helpers import save_model
from tests.serving import MODEL, Served, serving

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/apply-template")
POSTS += ("/v1/messages", "/v1/messages/count_tokens", "/completion", "/infill")
POSTS += ("/api/chat", "/api/generate", "/api/show")
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/props", "/slots")
GETS += ("/api/tags", "/api/version")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    medusa = Medusa.from_pretrained(
        save_model(tmp_path_factory.mktemp("fuzz") / "model"), drafter=None, dtype="fp32"
    )
    with serving(medusa, max_new_tokens=8) as running:
        yield running


@pytest.mark.quick(
    "/infill-positive",
    "/props-positive",
    "/v1/messages/count_tokens-positive",
    "/v1/responses-positive",
    "/api/tags-positive",
)
@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, mode) for path in POSTS for mode in ("positive", "negative")]
    + [(p, "positive") for p in GETS],
)
def test_random_requests_get_documented_answers(server: Served, path: str, mode: str) -> None:
    # Imported for seconds, which every process of pytest would spend on collecting the tests.
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    # Not checked: that a valid body is answered (a token id may be beyond the vocabulary), and that any other is
    # refused (null is read as left out).
    conforming = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    [operation] = [result.ok() for result in api.get_all_operations() if result.ok().path == path]

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @settings(
        max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # any other name would end in 404
        case.validate_response(case.call(), checks=conforming)

    check()
    assert server.request("GET", "/health")[0] == 200
