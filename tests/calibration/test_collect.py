"""Rounds as they are recorded: against the engine's own counts, around stops and limits, and through the file."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.calibration.collect import (
    Records,
    check_drafter,
    collect,
    fingerprint,
    load_records,
    merge,
    save_records,
)
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from tests.decoding.tiny import BLOCK, other_drafter, tiny_drafter, tiny_target

TARGET, DRAFTER = tiny_target(), tiny_drafter()
STOP = (7,)


def requests(count: int, temperature: float = 1.0) -> list[Request]:
    """Prompts of 1 to 5 tokens and limits of 1 to 30, so that slots end and are filled again at different times."""
    return [
        Request(f"r{i}", tuple(range(1, 2 + i % 5)), SamplingParams(temperature, seed=i, max_tokens=1 + (7 * i) % 30))
        for i in range(count)
    ]


def record(jobs: list[Request], batch_size: int = 4, drafter: SimpleNamespace = DRAFTER) -> Records:
    domains = ["even" if i % 2 == 0 else "odd" for i in range(len(jobs))]
    held_out = [i % 3 == 0 for i in range(len(jobs))]
    return collect(TARGET, drafter, jobs, domains, held_out, batch_size=batch_size, stop_ids=STOP)


@pytest.fixture(scope="module")
def records() -> Records:
    return record(requests(24))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_the_engines_own(temperature):
    """The same answers as `Generator` gives, with its number of rounds and of verified tokens for each request."""
    jobs = requests(13, temperature)
    found = record(jobs)
    generator = Generator(TARGET, DRAFTER, batch_size=4, stop_ids=STOP)
    done = {completion.id: completion for completion in generator.generate(jobs)}
    for number, name in enumerate(found.ids):
        rows = found.request == number
        assert found.round[rows].tolist() == list(range(done[name].rounds))
        assert found.verified[rows].sum() == done[name].verified
        assert found.tokens[number] == len(done[name].token_ids)
        assert found.prompt_tokens[number] == done[name].prompt_tokens == len(jobs[number].prompt_ids)
        whole = found.accepted[rows][:-1]  # only the last round can be cut, by a stop or the limit
        assert (np.diff(found.position[rows]) == whole + 1).all()
        assert whole.sum() <= done[name].accepted <= found.accepted[rows].sum()
        assert not rows.any() or found.position[rows][0] == len(jobs[number].prompt_ids)


def test_what_is_recorded_does_not_depend_on_the_batch(records):
    alone = record(requests(24), batch_size=1)
    for name in ("accepted", "verified", "request", "round", "position", "tokens"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(records, name), err_msg=name)
    np.testing.assert_allclose(alone.confidence, records.confidence, atol=1e-5)


def test_whole_blocks_are_verified_but_near_the_limit(records):
    left = np.array([r.sampling.max_tokens for r in requests(24)])[records.request]
    generated = records.position - records.prompt_tokens[records.request] + 1
    np.testing.assert_array_equal(records.verified, np.minimum(BLOCK, left - generated - 1))
    assert (records.accepted <= records.verified).all() and (records.verified == BLOCK).any()
    assert ((records.confidence > 0) & (records.confidence < 1)).all()


def test_acceptance_is_told_before_a_stop_token_cuts_the_round():
    """In a round that a stop token ended, more may have been accepted than was committed."""
    jobs = [Request(f"r{i}", (1, 2), SamplingParams(1.0, seed=i, max_tokens=40)) for i in range(40)]
    found = record(jobs)
    last = np.flatnonzero(np.append(np.diff(found.request) > 0, True))
    committed = found.tokens[found.request[last]] - 1 - (found.position - found.prompt_tokens[found.request])[last]
    assert (found.accepted[last] + 1 >= committed).all() and (found.accepted[last] + 1 > committed).any()


@pytest.mark.parametrize("fields", [{"confidence_temperatures": (2.0,)}, {"confidence_biases": (-1.0,)}], ids=str)
def test_a_calibration_of_the_drafter_is_not_in_the_records(records, fields):
    config = replace(DRAFTER.config, **{name: values * BLOCK for name, values in fields.items()})
    again = record(requests(24), drafter=SimpleNamespace(config=config, params=DRAFTER.params))
    np.testing.assert_array_equal(again.confidence, records.confidence)


def test_a_request_that_ends_with_its_first_token_has_no_rounds():
    jobs = [Request("one", (1, 2), SamplingParams(1.0, seed=1, max_tokens=1))]
    found = record(jobs)
    assert found.confidence.shape == (0, BLOCK) and found.tokens.tolist() == [1]
    assert found.split(False).confidence.shape == (0, BLOCK)


def test_parts_and_domains(records):
    assert records.domains == ("even", "odd") and records.about["block_size"] == BLOCK
    fit, test = records.split(False), records.split(True)
    assert len(fit.accepted) + len(test.accepted) == len(records.accepted)
    assert set(test.request % 3) == {0} and 0 not in set(fit.request % 3)
    assert (records.domain == np.arange(24) % 2).all()


def test_records_survive_the_file(records, tmp_path):
    save_records(tmp_path / "a.npz", records)
    again = load_records(tmp_path / "a.npz")
    for name in ("confidence", "accepted", "verified", "request", "round", "position", "domain", "held_out", "tokens"):
        one, other = getattr(again, name), getattr(records, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (again.ids, again.domains, again.about) == (records.ids, records.domains, records.about)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz"]


def test_damaged_files_are_refused(records, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_records(tmp_path / "none.npz")
    file = tmp_path / "a.npz"
    save_records(file, records)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"some text"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"records .*a.npz: no whole file"):
            load_records(file)
    np.savez(file, confidence=np.zeros((2, 3)))
    with pytest.raises(ValueError, match="no whole file"):
        load_records(file)
    save_records(file, records)
    with np.load(file) as arrays:
        np.savez(file, **(dict(arrays) | {"accepted": np.zeros(3, np.int8)}))
    with pytest.raises(ValueError, match=r"accepted \(3,\): must be"):
        load_records(file)


def test_records_of_several_runs_become_one(records):
    jobs = requests(30)[24:]
    other = collect(TARGET, DRAFTER, jobs, ["a"] * 6, [True] * 6, batch_size=4, stop_ids=STOP)
    both = merge([records, other])
    assert both.domains == ("a", "even", "odd") and both.ids == (*records.ids, *other.ids)
    late = both.rows(both.request >= 24)
    np.testing.assert_array_equal(late.confidence, other.confidence)
    np.testing.assert_array_equal(late.request - 24, other.request)
    assert both.domain[24:].tolist() == [0] * 6 and (both.domain[:24] == records.domain + 1).all()
    assert len(both.split(True).accepted) == len(records.split(True).accepted) + len(other.accepted)
    with pytest.raises(ValueError, match="request 'r0': is in the records twice"):
        merge([records, records])
    with pytest.raises(ValueError, match="records of drafters that differ: fingerprint"):
        merge([records, replace(other, about=other.about | {"fingerprint": "0"})])


def test_drafters_without_confidences_are_refused():
    for drafter in (tiny_drafter(confidence=False), other_drafter("ngram"), other_drafter("mtp")):
        with pytest.raises(ValueError, match="without a confidence head: there is nothing to calibrate"):
            check_drafter(drafter.config)
    with pytest.raises(ValueError, match="2 requests with 1 ids"):
        collect(TARGET, DRAFTER, requests(1) * 2, ["a", "a"], [False, False], stop_ids=STOP)


def test_the_fingerprint_tells_drafters_apart():
    params = DRAFTER.params
    other = params | {"confidence": params["confidence"] | {"b": params["confidence"]["b"] + 1}}
    assert fingerprint(params) == fingerprint(dict(params)) != fingerprint(other)
