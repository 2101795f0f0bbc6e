"""The server over an engine whose schedule shares a budget of rows, by a curve made by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient

from dspark_jax.serving.http.app import create_app
from tests.evaluation.tiny import curve
from tests.serving.http.conftest import COMPLETIONS, MODEL, make_engine, serving
from tests.serving.http.test_metrics import samples

BLOCK, TOKENS = 7, 24
PROMPTS = ("one", "two", "three", "a longer prompt than the others")


@pytest.mark.parametrize("schedule", ["causal", "async"])
def test_greedy_answers_and_the_verify_budget(models, plain, schedule):
    """More requests than slots, one of them plain: texts of plain decoding, and metrics that are the answers' sums."""
    cheap_rows = curve((2,), BLOCK, draft=0.01, row=0.02)
    engine = make_engine(models, batch_size=2, schedule=schedule, curve=cheap_rows, buckets=(2, 6, 16))
    with serving(models, engine) as service, TestClient(create_app(service)) as client:

        def ask(number: int):
            body = {"prompt": PROMPTS[number], "temperature": 0, "max_tokens": TOKENS, "trace": True}
            return client.post(COMPLETIONS, json=body | {"speculative": number != 1}).json()

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(len(PROMPTS))))
        found = samples(client)
        assert client.get(f"/v1/models/{MODEL}").json()["dspark"]["schedule"] == schedule
    assert [answer["choices"][0]["text"] for answer in answers] == [plain(prompt) for prompt in PROMPTS]
    summaries = [answer["dspark"]["summary"] for answer in answers]
    assert summaries[1]["drafted"] == 0 and summaries[1]["verify_budget"] == 1
    rounds = sum(one["rounds"] for one in summaries)
    rows = rounds + sum(one["verified"] for one in summaries)
    assert rows > rounds
    assert found["dspark_request_rounds_total",] == rounds and found["dspark_verified_rows_total",] == rows
    assert found["dspark_verify_budget",] == pytest.approx(rows / rounds)
    buckets = {int(key[1]): count for key, count in found.items() if key[0] == "dspark_rounds_by_bucket_total"}
    assert sum(buckets.values()) == found["dspark_rounds_total",] >= found["dspark_drafted_rounds_total",] > 0
    padded = sum(size * count for size, count in buckets.items())
    assert padded == rows + found["dspark_padding_rows_total",]
    verified = sum(found["dspark_verified_drafts_total", str(i)] for i in range(1, BLOCK + 1))
    assert verified == rows - rounds
