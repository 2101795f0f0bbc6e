"""Made-up requests from the description of the API: never a 5xx, and answers as described. Needs schemathesis."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from dspark_jax.serving.http.app import create_app
from tests.serving.http.conftest import make_engine, serving

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def api(models):
    """The description, with the application behind it; a short context keeps the answers short."""
    with serving(models, make_engine(models, max_context=64)) as service:
        config = schemathesis.Config.from_dict({"checks": {"positive_data_acceptance": {"enabled": False}}})
        yield schemathesis.openapi.from_asgi("/openapi.json", create_app(service), config=config)


described = schemathesis.pytest.from_fixture("api")


@described.parametrize()
@settings(max_examples=25, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
def test_the_server_keeps_what_it_describes(case):
    case.call_and_validate()
