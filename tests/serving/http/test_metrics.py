"""Metrics: counts that agree with the answers."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.serving.http.app import create_app
from dspark_jax.serving.http.metrics import Drafts
from tests.serving.http.conftest import CHAT, COMPLETIONS, serving


def samples(client) -> dict[tuple, float]:
    """All samples by name and labels."""
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_counts_agree_with_the_answers(models):
    with serving(models) as service, TestClient(create_app(service)) as client:
        before = samples(client)
        assert before["dspark_requests_active",] == before["dspark_requests_waiting",] == 0
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "trace": True, "temperature": 0}
        answer = client.post(CHAT, json=body).json()
        client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5, "temperature": 0})
        client.post(COMPLETIONS, json={})
        client.get("/some/path")
        found = samples(client)
    requests = "dspark_http_requests_total"
    assert found[requests, "/v1/chat/completions", "200", "POST"] == 1
    assert found[requests, "/v1/completions", "200", "POST"] == found[requests, "/v1/completions", "400", "POST"] == 1
    assert found[requests, "404", "GET", "other"] == 1 and found["dspark_http_request_seconds_count", "other"] == 1
    summary = answer["dspark"]["summary"]
    verified = sum(found["dspark_verified_drafts_total", str(i)] for i in range(1, 8))
    accepted = [found["dspark_accepted_drafts_total", str(i)] for i in range(1, 8)]
    assert verified >= summary["verified"] and sum(accepted) >= summary["accepted"]
    assert accepted == sorted(accepted, reverse=True)
    rounds = found["dspark_request_rounds_total",]
    assert found["dspark_verified_rows_total",] == rounds + verified
    assert found["dspark_generated_tokens_total",] == rounds + sum(accepted) + 2
    assert found["dspark_time_to_first_token_seconds_count",] == 2
    assert found["dspark_inter_token_seconds_count",] == found["dspark_generated_tokens_total",] - 2
    assert found["dspark_requests_ended_total", "completed"] == 2
    assert found["dspark_tokens_per_second",] > 0 and found["dspark_verify_budget",] >= 1
    assert found["dspark_engine_seconds_total", "rounds"] > 0
    assert found["dspark_padding_rows_total",] >= 0 and found["dspark_accepted_length",] >= 1


def test_drafts_by_position():
    drafts = Drafts(3)
    for one in (RoundTrace((1, 2), (2, 3, 4), (), 3, 1), RoundTrace((1,), (2, 3, 4), (), 1, 0), RoundTrace((1,))):
        drafts.add(one.verified, one.accepted)
    assert (drafts.verified, drafts.accepted) == ([2, 1, 1], [1, 0, 0])
    names = {family.name: [s.labels["position"] for s in family.samples] for family in drafts.collect()}
    assert names == {"dspark_verified_drafts": ["1", "2", "3"], "dspark_accepted_drafts": ["1", "2", "3"]}


def test_plain_engines_have_no_positions():
    assert all(not family.samples for family in Drafts(SimpleNamespace(block_size=0).block_size).collect())
