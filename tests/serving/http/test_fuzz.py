"""Made-up requests from the description of the API: never a 5xx, and answers as described. Needs schemathesis."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dspark_jax.serving.http.app import create_app
from tests.serving.http.conftest import CHAT, COMPLETIONS, make_engine, serving

schemathesis = pytest.importorskip("schemathesis")
POSTS, GETS = (CHAT, COMPLETIONS), ("/health", "/metrics", "/v1/models", "/v1/models/{model}")
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [*(("POST", path, mode) for path in POSTS for mode in (GOOD, BAD)), *(("GET", path, GOOD) for path in GETS)]


@pytest.fixture(scope="module")
def api(models):
    """The description, with the application behind it; a short context keeps the answers short."""
    with serving(models, make_engine(models, max_context=64)) as service:
        # what fits the schema may be too long for the context
        config = schemathesis.Config.from_dict({"checks": {"positive_data_acceptance": {"enabled": False}}})
        yield schemathesis.openapi.from_asgi("/openapi.json", create_app(service), config=config)


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_the_server_keeps_what_it_describes(api, method, path, mode):
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=30, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
    def holds(case) -> None:
        case.call_and_validate()

    holds()
