"""Keys, sizes, queues, ids, the log, health, the page, and the end: what surrounds the answers."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from dspark_jax.serving.http import routes
from dspark_jax.serving.http.app import create_app
from dspark_jax.serving.http.middleware import request_id
from dspark_jax.serving.http.page import content_policy
from dspark_jax.serving.http.service import Service, Serving
from tests.serving.http.conftest import CHAT, COMPLETIONS, MODEL, SLOTS, WAITING, make_engine, serving, until

ASK = {"prompt": "one", "temperature": 0, "max_tokens": 24}


def changed(service, **options):
    """The same engine behind other limits."""
    return Service(service.engine, service.tokenizer, Serving(MODEL, **options))


# --- keys ---


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic c2VjcmV0", "secret", "Bearer secretx"])
def test_without_a_key_it_is_401(service, header):
    client = TestClient(create_app(changed(service, keys=("secret", "other"))))
    response = client.get("/v1/models", headers={} if header is None else {"Authorization": header})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert "send the header `Authorization: Bearer KEY`" in error["message"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert client.post(CHAT, content=b"not even json").status_code == 401


@pytest.mark.parametrize("header", ["Bearer secret", "bearer other"])
def test_every_key_is_good(service, header):
    client = TestClient(create_app(changed(service, keys=("secret", "other"))))
    assert client.get("/v1/models", headers={"Authorization": header}).status_code == 200
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200  # need none


# --- sizes ---


def test_bodies_above_the_limit_are_413(service):
    client = TestClient(create_app(changed(service, max_body=200)))
    assert client.post(COMPLETIONS, json=ASK).status_code == 200
    response = client.post(COMPLETIONS, json=ASK | {"prompt": "a" * 300})
    assert response.status_code == 413
    assert re.fullmatch(r"the body has \d+ bytes: must have at most 200", response.json()["error"]["message"])
    short = client.post(COMPLETIONS, content=b"a" * 200, headers={"Content-Type": "application/json"})
    assert short.status_code == 400  # short enough, but no JSON


def test_the_queue_has_an_end(client, service, gate, plain):
    """The engine stands still; every place is taken, the next request is refused, and all others are answered."""
    with ThreadPoolExecutor(SLOTS + WAITING) as pool:
        running = [pool.submit(client.post, COMPLETIONS, json=ASK) for _ in range(SLOTS + WAITING)]
        until(lambda: len(service.at_work) == SLOTS + WAITING)
        refused = client.post(COMPLETIONS, json=ASK)
        health = client.get("/health").json()
        gate.set()
        answers = [one.result() for one in running]
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full" and refused.json()["error"]["type"] == "rate_limit_error"
    assert health["status"] == "ok" and health["active"] + health["waiting"] >= SLOTS
    assert {one.json()["choices"][0]["text"] for one in answers} == {plain("one")}
    assert client.post(COMPLETIONS, json=ASK).status_code == 200


# --- ids and the log ---


def test_request_ids_are_echoed_or_made(client):
    assert client.get("/health", headers={"X-Request-Id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    made = {client.get("/nowhere").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(re.fullmatch("req-[0-9a-f]{32}", one) for one in made)


@pytest.mark.parametrize("given", [None, "", "a b", "a\nb", "é", "x" * 129, 'a"b'])
def test_ids_that_logs_cannot_hold_are_replaced(given):
    assert request_id(given).startswith("req-")


def test_one_line_of_log_a_request(client, caplog):
    caplog.set_level(logging.INFO, logger="dspark_jax.serving.http")
    client.post(COMPLETIONS, json=ASK, headers={"X-Request-Id": "mine"})
    client.post(COMPLETIONS, json=ASK | {"stream": True})
    client.get("/a%1b[31mb")
    lines = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms, 3 \+ \d+ tokens, mine", lines[0])
    assert re.fullmatch(r"POST /v1/completions 200 \d+\.\d ms, 3 \+ \d+ tokens, req-\w+", lines[1])
    assert "\x1b" not in lines[2] and " 404 " in lines[2] and len(lines) == 3


# --- errors of the framework ---


def test_unknown_paths_and_methods_have_error_bodies(client):
    missing, wrong = client.get("/v2/x"), client.get(CHAT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["message"].startswith("path '/v2/x': nothing is here")
    assert wrong.json()["error"]["message"] == f"method GET of '{CHAT}': must be POST"
    assert wrong.headers["allow"] == "POST"
    assert client.get("/v1/models/").status_code == client.get("/docs").status_code == 404


def test_what_nobody_catches_is_500(client, service, monkeypatch, caplog):
    def breaks(*_):
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(routes, "prompt_ids", breaks)
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]}, headers={"X-Request-Id": "r1"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "r1"
    message = response.json()["error"]["message"]
    assert "r1" in message and "secret" not in message and "a secret detail" in caplog.text


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_breaks_off_says_so(client, service, monkeypatch, streamed):
    from dspark_jax.serving.http.answer import AnswerText

    def breaks(self, event):
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(AnswerText, "push", breaks)
    response = client.post(COMPLETIONS, json=ASK | {"stream": streamed})
    assert response.status_code == (200 if streamed else 500)
    assert "the engine failed before the answer's end" in response.text and "secret" not in response.text
    until(lambda: not service.at_work)


# --- models, health, page ---


def test_models(client, service):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == [MODEL]
    about = {"drafter": "golden", "schedule": "fixed", "block_size": 7, "context": 256}
    assert listed["data"][0]["dspark"] == about and listed["data"][0]["object"] == "model"
    assert client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    unknown = client.get("/v1/models/some/other")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


def test_health_of_an_engine_that_starts_drains_or_fails(models, monkeypatch):
    engine = make_engine(models)
    service = Service(engine, models.target.tokenizer, Serving(MODEL))
    client = TestClient(create_app(service))
    assert (client.get("/health").status_code, client.get("/health").json()["status"]) == (503, "starting")
    assert client.post(COMPLETIONS, json=ASK).json()["error"]["code"] == "starting"
    with engine:
        assert client.get("/health").json() == {"status": "ok", "active": 0, "waiting": 0}
        monkeypatch.setattr(engine.batch, "advance", lambda rounds: 1 / 0)
        failed = client.post(COMPLETIONS, json=ASK)
        streamed = client.post(COMPLETIONS, json=ASK | {"stream": True})
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_failed"
        assert streamed.status_code == 503
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.headers["retry-after"] and health.json()["error"]["code"] == "failed"
        assert client.post(COMPLETIONS, json=ASK).status_code == 503


def test_draining_refuses_the_new_and_lets_the_old_end(models, plain):
    with serving(models) as service, TestClient(create_app(service)) as client:
        opened, advance = threading.Event(), service.engine.batch.advance
        service.engine.batch.advance = lambda rounds: opened.wait(120) and advance(rounds)
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(client.post, COMPLETIONS, json=ASK)
            until(lambda: service.at_work)
            assert client.portal is not None
            drained = client.portal.start_task_soon(service.drain, 60.0)
            until(lambda: service.phase == "draining")
            refused = client.post(COMPLETIONS, json=ASK)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert client.get("/health").status_code == 503
            opened.set()
            assert running.result().json()["choices"][0]["text"] == plain("one")
            assert drained.result(60) is True


@pytest.mark.parametrize("streamed", [False, True])
def test_draining_cuts_off_what_takes_too_long(models, streamed):
    with serving(models) as service, TestClient(create_app(service)) as client, ThreadPoolExecutor(1) as pool:
        opened, advance = threading.Event(), service.engine.batch.advance
        service.engine.batch.advance = lambda rounds: opened.wait(120) and advance(rounds)
        running = pool.submit(client.post, COMPLETIONS, json=ASK | {"stream": streamed})
        until(lambda: service.at_work)
        assert client.portal is not None
        assert client.portal.call(service.drain, 0.01) is False
        opened.set()
        response = running.result()
        assert response.status_code == (200 if streamed else 503)
        assert "the server ended before the answer did" in response.text
        until(lambda: not service.at_work)


def test_the_page_may_only_run_what_is_written_in_it(service, tmp_path):
    page = tmp_path / "page.html"
    assert TestClient(create_app(service, page)).get("/").json()["error"]["message"].startswith("path '/': this")
    page.write_text("<!doctype html><style>p{}</style><script>let a = '<b>';</script><p>hi</p><script>2</script>")
    response = TestClient(create_app(service, page)).get("/")
    assert response.status_code == 200 and "<p>hi</p>" in response.text
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert policy.count("sha256-") == 3 and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_hashes_are_of_the_text_between_the_tags():
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(b"\nlet x = 1 < 2 && 'a';\n").digest()).decode()
    assert f"script-src 'sha256-{digest}'" in content_policy("<script>\r\nlet x = 1 < 2 && 'a';\r\n</script>")
    assert "script-src 'none'" in content_policy("<script src='https://elsewhere'></script>")


def test_the_description_of_the_api_has_no_422(client):
    found = client.get("/openapi.json").json()
    assert set(found["paths"]) == {
        CHAT, COMPLETIONS, "/v1/models", "/v1/models/{model}", "/health", "/metrics",
    }  # fmt: skip
    for path in found["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in found["components"]["schemas"]
    assert {"400", "401", "404", "413", "429", "500", "503"} <= set(found["paths"][CHAT]["post"]["responses"])
