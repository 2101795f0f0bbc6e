"""Outcomes in a folder: kept as they come, read back whole, and refused where they were made otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from dspark_jax.evaluation.store import ABOUT, OUTCOMES, OutcomeStore, chat_digest, fingerprint, prompt_digests
from tests.evaluation.outcome_sets import benchmark, outcome

HERE: dict[str, Any] = {"protocol": {"temperature": 0.0, "seed": 0}, "systems": {"d": {"fingerprint": "1"}}}
FIRST, SECOND = (outcome("d", "a", f"c{i}", [1, 2], wall=0.5) for i in (0, 1))


def test_outcomes_are_read_back(tmp_path: Path) -> None:
    with OutcomeStore(tmp_path / "new/out", HERE) as store:
        assert store.done == {}
        store.keep(FIRST)
        assert store.done == {FIRST.id: FIRST}
    with OutcomeStore(tmp_path / "new/out", HERE) as store:
        assert store.done == {FIRST.id: FIRST}
        with pytest.raises(ValueError, match="is there already"):
            store.keep(FIRST)
        store.keep(SECOND)
    with OutcomeStore(tmp_path / "new/out", HERE) as store:
        assert store.done == {FIRST.id: FIRST, SECOND.id: SECOND}


def test_what_is_kept_is_what_is_read_back(tmp_path: Path) -> None:
    """Confidences are written shorter than they are, to seven digits however small."""
    one = replace(FIRST, confidence=((0.1234567891, 1.23456789e-8, 1 - 2**-24), (0.5, 0.0, 1.0)))
    with OutcomeStore(tmp_path, HERE) as store:
        store.keep(one)
        kept = store.done[one.id]
    with OutcomeStore(tmp_path, HERE) as store:
        assert store.done == {one.id: kept}
    assert kept.confidence == ((0.1234568, 1.234568e-8, 0.9999999), (0.5, 0.0, 1.0))


def test_a_half_written_line_is_dropped(tmp_path: Path) -> None:
    with OutcomeStore(tmp_path, HERE) as store:
        store.keep(FIRST)
    with (tmp_path / OUTCOMES).open("a") as file:
        file.write(json.dumps(SECOND.as_json())[:50])
    with OutcomeStore(tmp_path, HERE) as store:
        assert store.done == {FIRST.id: FIRST}
        store.keep(SECOND)
    with OutcomeStore(tmp_path, HERE) as store:
        assert list(store.done) == [FIRST.id, SECOND.id]


def test_what_is_new_is_added(tmp_path: Path) -> None:
    """Another system, or more prompts, go into the same folder."""
    with OutcomeStore(tmp_path, HERE | {"prompts": {"a": {"c0": "1"}}}):
        pass
    with OutcomeStore(tmp_path, HERE | {"systems": {"e": {"fingerprint": "2"}}, "prompts": {"a": {"c1": "2"}}}):
        pass
    found = json.loads((tmp_path / ABOUT).read_text())
    assert found["systems"] == {"d": {"fingerprint": "1"}, "e": {"fingerprint": "2"}}
    assert found["prompts"] == {"a": {"c0": "1", "c1": "2"}} and found["protocol"] == HERE["protocol"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"protocol": {"temperature": 1.0, "seed": 0}}, "protocol.temperature was 0.0 and is 1.0 now"),
        ({"systems": {"d": {"fingerprint": "9"}}}, "systems.d.fingerprint was '1' and is '9' now"),
        ({"systems": {"d": {"fingerprint": "1", "schedule": {}}, "e": 1}, "protocol": 3}, "protocol was"),
    ],
)
def test_outcomes_made_otherwise_are_refused(tmp_path: Path, about: dict[str, Any], message: str) -> None:
    with OutcomeStore(tmp_path, HERE) as store:
        store.keep(FIRST)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError) as error:
        OutcomeStore(tmp_path, about)
    assert message in str(error.value) and "give another --output, or remove it" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file, must be a folder"):
        OutcomeStore(tmp_path / "file", HERE)
    (tmp_path / OUTCOMES).write_text("{}\n")
    with pytest.raises(ValueError, match="has outcomes.jsonl and no outcomes.about.json"):
        OutcomeStore(tmp_path, HERE)
    (tmp_path / ABOUT).write_text("{}")
    with pytest.raises(ValueError, match="lacks id, system"):
        OutcomeStore(tmp_path, HERE)
    (tmp_path / ABOUT).write_text("[")
    with pytest.raises(ValueError, match="not readable as JSON"):
        OutcomeStore(tmp_path, HERE)


def test_fingerprints_are_of_config_and_weights() -> None:
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": [jnp.zeros(200_000)]}
    mine = fingerprint("config", params)
    assert len(mine) == 16 and mine == fingerprint("config", {"a": params["a"] + 0, "b": [jnp.zeros(200_000)]})
    others = [
        fingerprint("other", params),
        fingerprint("config", params | {"a": params["a"].at[1, 2].add(1e-6)}),
        fingerprint("config", params | {"a": params["a"].T}),
        fingerprint("config", params | {"a": params["a"].astype(jnp.bfloat16)}),
        fingerprint("config", params | {"b": [jnp.ones(200_000)]}),
        fingerprint("config", {"c": params["a"], "b": params["b"]}),
    ]
    assert len({mine, *others}) == 1 + len(others)


def test_what_a_tokenizer_makes_of_conversations_is_known() -> None:
    mine = SimpleNamespace(chat_template="{{ x }}", prefix_ids=(1,), eos_ids=[2])
    others = [vars(mine) | change for change in ({"chat_template": None}, {"prefix_ids": ()}, {"eos_ids": [2, 3]})]
    digests = {chat_digest(one) for one in (mine, *(SimpleNamespace(**other) for other in others))}
    assert len(digests) == 4 and chat_digest(mine) == chat_digest(SimpleNamespace(**vars(mine), other=1))


def test_prompts_are_known_by_their_turns() -> None:
    found = prompt_digests([benchmark("a", conversations=2), benchmark("b", turns=2)])
    assert found["a"]["c0"] == found["a"]["c1"] != found["b"]["c0"] and len(found["a"]["c0"]) == 8
