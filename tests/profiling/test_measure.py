"""Measuring with tiny models: every bucket is reached, positions stay in the caches, and curves are found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding.batching import run_many
from dspark_jax.decoding.budget import PLAIN
from dspark_jax.decoding.curve import Point, Prefill
from dspark_jax.decoding.generate import Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import init_params as init_drafter
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.transformer import init_params as init_target
from dspark_jax.profiling import measure, provide
from dspark_jax.profiling.curves import MeasuredPoint, Profile, default_path, load_curve, save_curve
from dspark_jax.profiling.measure import (
    Models,
    Rounds,
    Taken,
    Timing,
    measure_point,
    measure_prefills,
    prompt_lengths,
    span,
)
from dspark_jax.profiling.provide import command_for, curve_for, measure_into
from dspark_jax.sharding import MeshShape, make_mesh, put, shardings
from tests.decoding.tiny import SIZES, VOCAB

SHORT = Timing(repeats=3, seconds=1e-4)


TARGET = TransformerConfig(
    vocab_size=VOCAB, num_layers=2, tie_embeddings=False, max_positions=320, num_tokens=VOCAB, **SIZES
)  # fmt: skip
DRAFTER = DrafterConfig(
    block_size=1, num_layers=1, target_layer_ids=(0,), mask_token_id=VOCAB - 1, vocab_size=VOCAB,
    draft_vocab_size=VOCAB, markov_rank=4, markov_kind="vanilla", confidence=True, confidence_with_markov=True,
    shares_embeddings=True, num_target_layers=2, max_positions=320, **SIZES,
)  # fmt: skip


def random_params(init: Callable, config: object) -> dict[str, Any]:
    """Parameters in the form that `init` makes, without compiling it."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.4, x.dtype), shapes)


@pytest.fixture(scope="module")
def models() -> Models:
    """A tiny pair that never stops, with blocks of one token, so that few buckets are compiled."""
    target = SimpleNamespace(config=TARGET, params=random_params(init_target, TARGET))
    drafter = SimpleNamespace(config=DRAFTER, params=random_params(init_drafter, DRAFTER))
    return Models(target, drafter, stop_ids=())


@pytest.fixture(scope="module")
def plain(models: Models) -> Models:
    """Its target alone, for which every token is a stop token."""
    return replace(models, drafter=None, stop_ids=tuple(range(VOCAB)))


def fake(calls: list, scale: float = 1.0):
    """In place of `measure_point`: notes what was asked for."""

    def measure(models: Models, slots: int, context: int, timing: Timing | None = None) -> MeasuredPoint:
        calls.append((slots, context))
        buckets = (slots, slots * 4) if models.drafter is not None else (slots,)
        return MeasuredPoint(Point(slots, context, buckets, (scale, 2 * scale)[: len(buckets)], scale),
                             (0.0,) * (len(buckets) + 1), 1)  # fmt: skip

    return measure


@pytest.fixture
def asked(monkeypatch, tmp_path: Path) -> list[tuple[int, int]]:
    """Points that were measured, none of them really; curves lie in a folder of the test."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(provide, "measure_point", fake(calls))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_every_bucket_is_reached_and_positions_stay_in_the_cache(models: Models) -> None:
    bench = Rounds(models, 3, 256)
    assert bench.buckets == (3, 4, 6)
    assert bench.forces == (*range(len(bench.buckets)), PLAIN)
    limit = 256 - 2
    for force in bench.forces:
        taken = bench.run(force, bench.most, calls=2)
        assert taken.rounds == 2 * bench.most and taken.seconds > 0  # none was cut short
        wanted = [0] * len(bench.buckets)
        wanted[max(force, 0)] = taken.rounds
        assert list(taken.by_bucket) == wanted and taken.drafted == (0 if force == PLAIN else taken.rounds)
        start, counters = np.asarray(bench.state.start), bench.state.counters
        assert np.asarray(bench.state.active).all() and (start <= limit).all()
        assert (start > 64).all()  # about the middle
        if force == PLAIN:
            assert (start - start[0] == 0).all()  # a token a round
    assert (np.asarray(counters.verified) > 0).all()


def test_forced_buckets_are_full(models: Models) -> None:
    """The drafts that are verified fill the bucket to its last row."""
    bench = Rounds(models, 2, 256)
    before = np.zeros(2, int)
    for force, size in enumerate(bench.buckets):
        bench.run(force, 5)
        verified = np.asarray(bench.state.counters.verified)
        assert (verified - before).sum() == 5 * (size - 2)
        before = verified


@pytest.mark.parametrize("context", [256, 384, 2048])
@pytest.mark.parametrize("positions", [64, 256, 300, 4096])
@pytest.mark.parametrize("width", [1, 2, 8, 17])
def test_a_call_stays_in_the_middle(context: int, positions: int, width: int) -> None:
    start, most = span(context, positions, width)
    usable = min(context, positions)
    assert start >= 0 and most >= 1 and start + most * width <= usable - width
    assert abs(start + most * width / 2 - usable / 2) <= width
    assert most * width <= max(usable / 2, width)


def test_a_point_and_prefills_have_the_right_form(models: Models) -> None:
    found = measure_point(models, 2, 256, SHORT)
    assert found.place == (2, 256) and found.repeats == 3
    assert all(a < b for a, b in pairwise(found.point.buckets)) and min(found.point.drafted, default=0) > 0
    assert found.point.plain > 0 and len(found.spread) == len(found.point.buckets) + 1
    prefills = measure_prefills(models, (32,), SHORT)
    assert [p.tokens for p in prefills] == [32] and prefills[0].seconds > 0


def test_a_point_is_the_median_of_timings_in_turn(models: Models, monkeypatch) -> None:
    """With a clock of known costs: what is timed when and for how long, and what comes out."""
    costs = {0: 0.004, 1: 0.007, PLAIN: 0.003}
    timed: list[tuple[int, int, int]] = []

    class Clock:
        forces, buckets, most = (0, 1, PLAIN), (2, 4), 10

        def __init__(self, models: Models, slots: int, context: int) -> None:
            timed.clear()

        def run(self, force: int, rounds: int, calls: int = 1) -> Taken:
            timed.append((force, rounds, calls))
            slow = 5.0 if timed.count((force, rounds, calls)) == 2 and calls > 1 else 1.0  # one repeat is disturbed
            return Taken(costs[force] * rounds * calls * slow, rounds * calls, 0, ())

    monkeypatch.setattr(measure, "Rounds", Clock)
    found = measure_point(models, 2, 256, Timing(repeats=5, seconds=0.05))
    assert found.point.drafted == pytest.approx((0.004, 0.007)) and found.point.plain == pytest.approx(0.003)
    assert found.spread == pytest.approx((0, 0, 0), abs=1e-9) and found.repeats == 5
    measured = timed[-15:]
    assert [force for force, _, _ in measured] == [0, 1, PLAIN, PLAIN, 1, 0, 0, 1, PLAIN, PLAIN, 1, 0, 0, 1, PLAIN]
    assert all(costs[force] * rounds * calls >= 0.05 and rounds == 10 for force, rounds, calls in measured)
    measure_point(models, 2, 256, Timing(repeats=1, seconds=0.001))
    assert timed[-3:] == [(0, 4, 1), (1, 4, 1), (PLAIN, 4, 1)]  # no more rounds than an engine takes


def test_the_program_that_was_timed_is_the_one_that_decodes(models: Models) -> None:
    """After a measurement a generator with the curve's schedule compiles no rounds of its own."""
    Rounds(models, 2, 256).run(0, 1)
    before = run_many._cache_size()
    sampling = SamplingParams(1.0, max_tokens=6)
    requests = [Request(str(i), (1, 2, 3 + i), sampling) for i in range(2)]
    done = list(models.generator(2).generate(requests))
    assert [len(c.token_ids) for c in done] == [6, 6] and run_many._cache_size() == before


@pytest.mark.skipif(jax.device_count() < 2, reason="needs devices for a mesh")
def test_a_point_on_a_mesh(plain: Models) -> None:
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    params = put(plain.target.params, shardings(plain.target.params, mesh))
    spread = replace(plain, target=SimpleNamespace(config=TARGET, params=params), mesh=mesh)
    bench = Rounds(spread, 2, 256)
    assert bench.run(PLAIN, 3).rounds == 1  # a stop token ends it
    assert len(bench.state.target_cache[0].keys.sharding.device_set) == 2
    assert bench.state.target_cache[0].keys.addressable_shards[0].data.shape[0] == 1  # a request each
    assert spread.key.mesh == (2, 1, 1) != plain.key.mesh


def test_without_a_drafter_only_plain_rounds_are_timed(plain: Models) -> None:
    """Each call ends at a stop token after one round: what was taken counts, not what was asked for."""
    bench = Rounds(plain, 2, 256)
    assert bench.forces == (PLAIN,) and bench.buckets == (2,)
    taken = bench.run(PLAIN, 5, calls=3)
    assert taken.rounds == 3 and taken.by_bucket == (3,)
    found = measure_point(plain, 2, 256, SHORT).point
    assert found.buckets == (2,) and found.drafted == (found.plain,)
    assert plain.key.drafter == "none" and plain.key.block_size == 0


def test_prompt_lengths_are_those_of_programs() -> None:
    assert prompt_lengths(200, 4096) == (32, 64, 128, 256)
    assert prompt_lengths(32, 4096) == (32,) and prompt_lengths(1, 4096) == (32,)
    assert prompt_lengths(4096, 65) == (32, 64)  # 64 tokens leave room for one


@pytest.mark.parametrize(
    ("slots", "contexts", "message"),
    [
        ((0,), (256,), "slots 0: must be at least 1"),
        ((1,), (300,), "contexts 300: caches have 384 tokens there, give that"),
        ((1,), (512,), "contexts 512: the models have 320 positions, at most 384"),
    ],
)
def test_sizes_that_no_program_has_are_refused(models: Models, slots, contexts, message, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        measure_into(tmp_path / "curve.json", models, slots, contexts)
    assert not (tmp_path / "curve.json").exists()


@pytest.mark.parametrize("options", [{"repeats": 0}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_timings_that_cannot_be_are_refused(options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Timing(**options)


def test_points_are_added_to_a_file(plain: Models, asked, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "curve.json"
    first = measure_into(file, plain, (1, 2), (256,))
    assert load_curve(file) == first and asked == [(1, 256), (2, 256)]
    measure_into(file, plain, (2, 4), (256, 384))
    assert asked[2:] == [(2, 384), (4, 256), (4, 384)] and load_curve(file).slot_sizes == (1, 2, 4)
    monkeypatch.setattr(provide, "measure_point", fake(asked, 7.0))
    again = measure_into(file, plain, (2, 2), (256,), again=True)
    assert asked[5:] == [(2, 256)] and len(again.points) == 5
    assert {p.place: p.point.plain for p in again.points}[2, 256] == 7.0 == load_curve(file).curve.costs(2, 256).plain


def test_a_stopped_run_keeps_its_points(plain: Models, tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[int, int]] = []

    def stops(models: Models, slots: int, context: int, timing: Timing | None = None) -> MeasuredPoint:
        if calls:
            raise KeyboardInterrupt
        return fake(calls)(models, slots, context)

    monkeypatch.setattr(provide, "measure_point", stops)
    with pytest.raises(KeyboardInterrupt):
        measure_into(tmp_path / "curve.json", plain, (1, 2), (256,))
    assert load_curve(tmp_path / "curve.json").slot_sizes == (1,)


def test_a_stored_curve_is_found_and_nothing_is_measured(plain: Models, asked) -> None:
    measured = curve_for(plain, (1, 2), (256,), measure=True)
    assert default_path(plain.key).is_file() and len(asked) == 2
    assert curve_for(plain, (2,)) == measured == curve_for(plain, (1, 2), (256, 384), measure=True) and len(asked) == 2
    more = curve_for(plain, (1, 2, 4), (256,), measure=True)
    assert more.slot_sizes == (1, 2, 4) and asked[2:] == [(4, 256)]


def test_without_a_curve_the_command_is_told(plain: Models, asked, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no throughput curve is stored") as caught:
        curve_for(plain, (1, 2))
    words = "`dspark profile --drafter none --slots 1 2 --sampling plain --dtype float32`"
    assert str(caught.value).endswith(words) and not asked
    with pytest.raises(FileNotFoundError, match=r"mine\.json: no such file; measure one with .*--output .*mine\.json"):
        curve_for(plain, (1,), file=tmp_path / "mine.json")


def test_a_users_file_must_fit(models: Models, plain: Models, asked, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    curve = measure_into(file, plain, (1, 4), (256,)).curve
    assert curve_for(plain, (4,), file=file) == curve
    with pytest.raises(ValueError, match=r"mine\.json: has 1, 4 slots, lacks 2, 8; add them with `dspark profile"):
        curve_for(plain, (1, 2, 8), file=file)
    with pytest.raises(ValueError, match=r"mine\.json: drafter 'none' was profiled, it is '\w+' here: profile again"):
        curve_for(models, (1,), file=file)
    with pytest.raises(ValueError, match="mode 'plain' was profiled, it is 'greedy' here"):
        curve_for(replace(plain, mode="greedy"), (1,), file=file, measure=True)
    estimated = Profile(replace(plain.key, estimated=True), load_curve(file).points, (Prefill(32, 0.1),))
    save_curve(file, estimated)
    with pytest.raises(ValueError, match="estimated True was profiled, it is False here"):
        curve_for(plain, (1,), file=file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"mine\.json: damaged"):
        curve_for(plain, (1,), file=file)
    assert len(asked) == 2


def test_the_command_names_what_is_not_the_default(models: Models, tmp_path: Path) -> None:
    target, drafter = models.target, models.drafter
    target.path, drafter.path = Path("/models/t"), Path("/models/d")
    try:
        words = command_for(replace(models, mode="greedy"), (1, 8), tmp_path / "c.json")
    finally:
        del target.path, drafter.path
    assert words == (
        "dspark profile --target /models/t --drafter /models/d --slots 1 8 --sampling greedy --dtype float32 "
        f"--output {tmp_path / 'c.json'}"
    )
