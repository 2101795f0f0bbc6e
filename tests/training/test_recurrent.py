"""Losses of Eagle3 and MTP: golden states, losses, metrics and every gradient; masks, chunks, reduced vocabularies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import recurrent as checkpoint
from dspark_jax.checkpoints.load import Drafter, load_drafter
from dspark_jax.drafters import eagle3, mtp
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.layers import linear, softcap
from dspark_jax.training.losses import Batch, LossConfig
from dspark_jax.training.recurrent import check_loss, eagle3_loss, mtp_loss, unroll, with_successor

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "drafters"
NAMES = ("eagle3_qwen3", "eagle3_gemma4")
DECAY = -1 / math.log(0.8)  # 0.8^s
LOSS = LossConfig(ce=1.0, tv=0.0, confidence=0.0, decay=DECAY)


class Golden(NamedTuple):
    """One golden training step: the npz's arrays, the drafter, its frozen and trainable parts, and the batch."""

    data: dict[str, np.ndarray]
    drafter: Drafter
    frozen: dict[str, Any]
    trainable: dict[str, Any]
    batch: Batch
    lengths: jax.Array


def load(name: str) -> Golden:
    """The golden step of an Eagle3 drafter."""
    data, drafter = dict(np.load(FOLDER / name / "train.npz")), load_drafter(FOLDER / name)
    frozen = {part: drafter.params[part] for part in ("embed", "head")}
    trainable = {part: value for part, value in drafter.params.items() if part not in frozen}
    fields = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")
    batch = Batch(*(jnp.asarray(data[field]) for field in fields))
    return Golden(data, drafter, frozen, trainable, batch, jnp.asarray(data["attention_mask"].sum(axis=1)))


GOLDEN = {name: load(name) for name in NAMES}
DATA, DRAFTER, FROZEN, TRAINABLE, BATCH, LENGTHS = GOLDEN["eagle3_qwen3"]
SHORT = replace(DRAFTER.config, block_size=2)


@partial(jax.jit, static_argnames=("config", "loss", "dtype"))
def run_eagle(
    trainable: Any, frozen: Any, batch: Batch, lengths: Any, config=DRAFTER.config, loss=LOSS, dtype="float32"
):
    """Loss, metrics and gradients."""
    options = {} if lengths is None else {"lengths": lengths}
    objective = lambda t: eagle3_loss(t, frozen, config, loss, batch, jnp.dtype(dtype), **options)  # noqa: E731
    (total, metrics), grads = jax.value_and_grad(objective, has_aux=True)(trainable)
    return total, metrics, grads


@partial(jax.jit, static_argnames=("config", "loss"))
def run_loss(trainable: Any, frozen: Any, config=SHORT, loss=LOSS):
    """Loss and metrics alone, by default of two steps."""
    return eagle3_loss(trainable, frozen, config, loss, BATCH, jnp.float32, lengths=LENGTHS)


@pytest.mark.parametrize(("name", "atol"), [("eagle3_qwen3", 1e-4), ("eagle3_gemma4", 1e-3)])
def test_golden_states_and_logits(name: str, atol: float) -> None:
    """Hidden states and logits of every step at valid positions."""
    data, drafter, frozen, trainable, batch, lengths = GOLDEN[name]
    config = drafter.config
    model = jax.jit(partial(unroll, eagle3.MODEL, config=config, steps=config.block_size))
    states = model(trainable, embed=frozen["embed"], batch=batch)
    for s, state in enumerate(states):
        valid = np.arange(32) < np.asarray(lengths)[:, None] - s
        logits = softcap(linear(frozen["head"], eagle3.MODEL.read(trainable, config, state)), config.final_softcap)
        for got, what in ((state, "step_hidden"), (logits, "step_logits")):
            rows = np.asarray(got).T.reshape(2, 32, -1)[valid]
            np.testing.assert_allclose(rows, data[what][s][valid], atol=atol, err_msg=f"{what} {s}")


@pytest.mark.parametrize("name", NAMES)
def test_golden_losses_metrics_and_every_gradient(name: str) -> None:
    data, drafter, frozen, trainable, batch, lengths = GOLDEN[name]
    meta = json.loads((FOLDER / name / "train_meta.json").read_text())
    total, metrics, grads = run_eagle(trainable, frozen, batch, lengths, config=drafter.config)
    np.testing.assert_allclose(total, data["loss_total"], rtol=1e-5)
    for s, wanted in enumerate(data["step_loss"]):
        num, den = metrics[f"ploss_{s}"]
        np.testing.assert_allclose(num / den, wanted, rtol=1e-5)
    golden = {name.removeprefix("train/"): value for name, value in meta["metrics"].items()}
    assert set(golden) == set(metrics) | {"loss"}
    for metric, (num, den) in metrics.items():
        np.testing.assert_allclose(num / den, golden[metric], rtol=1e-4, atol=1e-6, err_msg=metric)
    got = checkpoint.named_tensors(drafter.config, grads, embeddings=False)
    if drafter.config.traits.layer_scalar:
        assert not got.pop("layers.0.layer_scalar").any()  # it is never trained
    wanted = load_file(FOLDER / name / "grads.safetensors")
    assert set(got) == set(wanted) == set(meta["trainable"])
    for tensor, value in wanted.items():
        np.testing.assert_allclose(got[tensor], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=tensor)


def test_step_weights_and_term_weight() -> None:
    total, _ = run_loss(TRAINABLE, FROZEN, loss=replace(LOSS, ce=0.5, decay=0.0))
    np.testing.assert_allclose(total, 0.5 * DATA["step_loss"][:2].sum(), rtol=1e-5)


def test_padding_and_unsupervised_tails_do_not_matter() -> None:
    """Without lengths a sequence ends at its last supervised token; what lies beyond changes nothing."""
    ends = [int(np.flatnonzero(row)[-1]) + 1 for row in np.asarray(BATCH.loss_mask)]
    assert ends == [32, 26]
    want = np.where(np.arange(32) < np.asarray(ends)[:, None] - 1, np.asarray(BATCH.loss_mask), 0)
    np.testing.assert_array_equal(with_successor(BATCH.loss_mask, None), want)
    assert not np.any(with_successor(jnp.zeros((1, 4)), None))
    noise = BATCH._replace(
        input_ids=BATCH.input_ids.at[1, 26:].set(7),
        features=BATCH.features.at[1, 26:].set(3.0),
        final=BATCH.final.at[1, 26:].set(-2.0),
    )
    one, two = (run_eagle(TRAINABLE, FROZEN, batch, None) for batch in (BATCH, noise))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, two)


def test_no_supervised_token_gives_zero() -> None:
    empty = BATCH._replace(loss_mask=jnp.zeros_like(BATCH.loss_mask))
    total, _, grads = run_eagle(TRAINABLE, FROZEN, empty, None)
    assert total == 0 and all(not np.any(np.asarray(x)) for x in jax.tree.leaves(grads))


def test_a_map_of_the_whole_vocabulary_changes_nothing() -> None:
    full = run_loss(TRAINABLE, FROZEN)
    mapped = run_loss(TRAINABLE, FROZEN | {"d2t": jnp.zeros(300, jnp.int32)})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), full, mapped)


def test_a_reduced_vocabulary_counts_the_mass_outside_as_lost() -> None:
    """Steps against numpy: p_t keeps its normaliser and its best token over all tokens, p_d is over the draft
    vocabulary."""
    ids = np.arange(0, 300, 3)
    offsets = jnp.asarray(ids - np.arange(len(ids)), jnp.int32)
    config = replace(DRAFTER.config, draft_vocab_size=len(ids), block_size=2)
    _, metrics = run_loss(TRAINABLE, FROZEN | {"d2t": offsets}, config=config)
    for step in range(2):
        ahead = DATA["target_logits"][:, step + 1 :].astype(np.float64)
        logits = np.pad(ahead, ((0, 0), (0, step + 1), (0, 0)))
        target = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[..., ids]
        draft = DATA["step_logits"][step].astype(np.float64)[..., ids]
        draft = draft - np.log(np.exp(draft).sum(-1, keepdims=True))
        mask = DATA["step_position_mask"][step]
        ce = -((target * draft).sum(-1) * mask).sum()
        np.testing.assert_allclose(metrics[f"ploss_{step}"][0], ce, rtol=1e-4)
        accept = np.minimum(target, np.exp(draft)).sum(-1)
        np.testing.assert_allclose(metrics[f"accept_rate@{step}"][0], (accept * mask).sum(), rtol=1e-4)
        correct = logits.argmax(-1) == ids[draft.argmax(-1)]
        assert metrics[f"accuracy@{step}"][0] == (correct * mask).sum()


def test_bfloat16_is_close() -> None:
    total, _, grads = run_eagle(TRAINABLE, FROZEN, BATCH, LENGTHS, config=SHORT, dtype="bfloat16")
    np.testing.assert_allclose(total, DATA["step_loss"][0] + 0.8 * DATA["step_loss"][1], rtol=0.02)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def mtp_case(name: str = "eagle3_qwen3") -> tuple[MTPConfig, Any]:
    """A random MTP drafter of a golden target's sizes."""
    shared = {field: getattr(GOLDEN[name].drafter.config, field) for field in MTPConfig.__dataclass_fields__}
    config = MTPConfig(**(shared | {"target_layer_ids": (), "block_size": 1}))
    params = mtp.init_params(config, jax.random.key(2))
    return config, jax.tree.map(lambda x: x if x.ndim == 1 else x * 8, params)


@pytest.mark.parametrize("name", NAMES)
def test_mtp_loss_is_its_formula(name: str) -> None:
    """CE and TV against numpy on the drafter's own logits: labels two ahead, the target's distribution one ahead."""
    config, params = mtp_case(name)
    data, _, frozen, _, batch, _ = GOLDEN[name]
    loss = LossConfig(ce=0.4, tv=0.6, confidence=0.0)
    total, metrics = jax.jit(partial(mtp_loss, config=config, loss=loss, compute_dtype=jnp.float32))(
        params, frozen, batch=batch
    )
    state = unroll(mtp.MODEL, params, config, frozen["embed"], batch, 1)[0]
    draft = softcap(linear(frozen["head"], state), config.final_softcap)
    draft = np.asarray(draft, np.float64).T.reshape(2, 32, -1)[:, :-2]
    draft = draft - np.log(np.exp(draft).sum(-1, keepdims=True))
    target = data["target_logits"][:, 1:-1].astype(np.float64)
    target = np.exp(target - np.log(np.exp(target).sum(-1, keepdims=True)))
    mask, labels = data["loss_mask"][:, 2:], data["input_ids"][:, 2:]
    ce = -np.take_along_axis(draft, labels[..., None], axis=-1)[..., 0]
    l1 = np.abs(np.exp(draft) - target).sum(-1)
    means = [(x * mask).sum() / mask.sum() for x in (ce, l1)]
    np.testing.assert_allclose(total, 0.4 * means[0] + 0.6 * means[1], rtol=1e-5)
    np.testing.assert_allclose(metrics["l1_loss"][0] / metrics["l1_loss"][1], means[1], rtol=1e-5)


def test_terms_that_a_kind_does_not_have_are_refused() -> None:
    config, _ = mtp_case()
    check_loss(config, LossConfig(confidence=0.0))
    check_loss(DRAFTER.config, LOSS)
    with pytest.raises(ValueError, match="loss.tv 0.9: Eagle3 trains on the soft cross entropy alone"):
        check_loss(DRAFTER.config, LossConfig(confidence=0.0))
    with pytest.raises(ValueError, match="loss.confidence 1.0: this drafter has no confidence head"):
        check_loss(config, LossConfig())
