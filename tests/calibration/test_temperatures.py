"""Temperatures and biases at decoding time and in other projects' formats: what is calibrated is c_k, nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibration.sts import scaled
from dspark_jax.checkpoints import specforge, speculators
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.schedule import verify_lengths
from dspark_jax.drafters.dspark import calibrated
from tests.checkpoints.tiny_drafters import block, float32, read_config, same_params
from tests.decoding.tiny import BLOCK, tiny_drafter, tiny_target

TARGET, DRAFTER = tiny_target(), tiny_drafter()
TEMPERATURES, BIASES = (0.5, 1.0, 4.0), (-1.0, 0.0, 0.5)


def with_temperatures(values: tuple[float, ...], biases: tuple[float, ...] = ()) -> SimpleNamespace:
    config = replace(DRAFTER.config, confidence_temperatures=values, confidence_biases=biases)
    return SimpleNamespace(config=config, params=DRAFTER.params)


def test_each_position_has_its_temperature():
    """As `sts.scaled` does it, to the rounding of float32; all 1 is exactly the same as none."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(5, BLOCK)) * 3, jnp.float32)
    plain = calibrated(z, DRAFTER.config)
    np.testing.assert_array_equal(plain, jax.nn.sigmoid(z))
    np.testing.assert_array_equal(calibrated(z, with_temperatures((1.0,) * BLOCK).config), plain)
    after = calibrated(z, with_temperatures(TEMPERATURES).config)
    np.testing.assert_allclose(after, scaled(np.asarray(plain), TEMPERATURES), atol=1e-5)
    assert after.dtype == jnp.float32


@pytest.mark.parametrize("temperatures", [TEMPERATURES, ()])
def test_each_position_has_its_bias(temperatures):
    """Added after the division, as `sts.scaled` does it; all 0 is exactly the same as none."""
    z = jnp.asarray(np.random.default_rng(1).normal(size=(5, BLOCK)) * 3, jnp.float32)
    without = calibrated(z, with_temperatures(temperatures).config)
    np.testing.assert_array_equal(calibrated(z, with_temperatures(temperatures, (0.0,) * BLOCK).config), without)
    after = calibrated(z, with_temperatures(temperatures, BIASES).config)
    wanted = scaled(np.asarray(jax.nn.sigmoid(z)), temperatures or (1.0,) * BLOCK, BIASES)
    np.testing.assert_allclose(after, wanted, atol=1e-5)
    assert after.dtype == jnp.float32


def test_the_threshold_schedule_sees_them_and_answers_do_not():
    """Huge temperatures bring every confidence to a half: below 0.55 all is verified, above nothing. Tokens stay."""
    jobs = [Request("a", (1, 2, 3), SamplingParams(1.0, seed=3, max_tokens=20))]

    def answer(temperatures: tuple[float, ...], threshold: float, biases: tuple[float, ...] = ()):
        drafter = with_temperatures(temperatures, biases)
        generator = Generator(TARGET, drafter, schedule="threshold", threshold=threshold, stop_ids=())
        return next(generator.generate(jobs))

    flat = (1e6,) * BLOCK
    none, everything = answer(flat, 0.55), answer(flat, 0.45)
    assert none.verified == 0 and none.rounds == 19
    assert everything.verified > 0 and everything.rounds < 19
    fixed = next(Generator(TARGET, DRAFTER, stop_ids=()).generate(jobs))
    assert everything.token_ids == fixed.token_ids and everything.accepted == fixed.accepted
    assert answer(flat, 0.45, (-2.0,) * BLOCK).verified == 0
    room = jnp.asarray([BLOCK], jnp.int32)
    confidence = calibrated(jnp.asarray([[2.0, 2.0, 2.0]]), with_temperatures(TEMPERATURES).config)
    assert int(verify_lengths("threshold", confidence, jnp.float32(0.7), room)[0]) == 2


@pytest.mark.parametrize("field", ["confidence_temperatures", "confidence_biases"])
@pytest.mark.parametrize("module", [specforge, speculators])
def test_formats_without_the_field_leave_them_out_with_a_warning(module, field, tmp_path, caplog):
    config, params = block()
    calibrated = replace(config, **{field: (2.0,) * config.block_size})
    with caplog.at_level(logging.WARNING, logger="dspark_jax"):
        module.write_drafter(tmp_path / "out", calibrated, params, storage_dtype="float32")
    assert f"{field}: " in caplog.text and "they are left out" in caplog.text
    assert field not in str(read_config(tmp_path / "out"))
    again, read = float32(tmp_path / "out")
    assert again == config
    same_params(params, read)
    caplog.clear()
    module.write_drafter(tmp_path / "out", config, params, storage_dtype="float32")
    assert "left out" not in caplog.text
