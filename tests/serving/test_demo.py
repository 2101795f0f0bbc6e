"""The demonstration, with tiny models and with answers that differ."""

from __future__ import annotations

import pytest

from dspark_jax.serving import demo
from dspark_jax.serving.settings import parse_settings


@pytest.fixture
def settings(models_flags):
    return parse_settings(["--demo", "--max-tokens", "8", *models_flags])


def test_demo_prints_both_speeds_and_equal_tokens(settings, capsys):
    summary, code = demo.run_demo(settings)
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith(demo.PROBLEM)
    words = ("plain ", "speculative ", "speed-up ", "accepted length ", "same tokens      yes")
    assert all(word in out for word in words)
    assert summary["comparison"]["equal_texts"] is True and summary["compilation_timed"] is False


def test_demo_fails_when_the_tokens_differ(settings, monkeypatch, capsys):
    def measured(generators, job, models):
        found = real_measure(generators, job, models)
        record, seconds = found["plain"]
        return found | {"plain": ({**record, "token_ids": [*record["token_ids"][:3], -1]}, seconds)}

    real_measure = demo.measure
    monkeypatch.setattr(demo, "measure", measured)
    _, code = demo.run_demo(settings)
    out, err = capsys.readouterr()
    assert code == 1 and "same tokens      NO" in out and "from token 3 on" in err


def test_first_difference():
    assert demo.first_difference([1, 2], [1, 2]) is None
    assert demo.first_difference([1, 2], [1, 3]) == 1
    assert demo.first_difference([1, 2], [1, 2, 3]) == 2
