"""z-lab's DFlash: the published layout, its slot convention at decoding and training time, and everything to refuse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import zlab
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.drafters.backbone import init_draft_cache
from dspark_jax.drafters.dspark import bind, propose
from dspark_jax.training.anchors import block_targets
from dspark_jax.training.forward import block_forward
from tests.checkpoints.tiny_drafters import (
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    block,
    edit,
    edit_tensors,
    float32,
    read_config,
    same_params,
    truncate,
)
from tests.decoding.tiny import tiny_drafter, tiny_target

SILENT = block("none", confidence=False, anchor=False)


@pytest.fixture
def folder(tmp_path):
    """A drafter in z-lab's format, to be changed."""
    zlab.write_drafter(tmp_path / "drafter", *SILENT)
    return tmp_path / "drafter"


def test_the_written_folder_is_that_of_the_published_drafters(folder):
    config = read_config(folder)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": VOCAB - 1, "target_layer_ids": [-1, 2, 6]}
    assert (config["block_size"], config["num_target_layers"], config["model_type"]) == (4, TARGET_LAYERS, "qwen3")
    names = {name for name in load_file(folder / "model.safetensors") if not name.startswith("layers.")}
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": ..., "dflash_config__block_size": 4},  # newer ones have it in there
        {"tie_word_embeddings": True, "sliding_window": None, "rope_scaling": None},
        {"dflash_config__projector_type": "dflash", "dflash_config__attention_mode": "gqa", "is_causal": False},
    ],
)
def test_slots_are_one_more_than_drafts(changes, folder):
    edit(folder, **changes)
    config, params = float32(folder)
    assert config == SILENT[0]
    assert (config.block_size, config.block_slots, config.anchor_predicts) == (3, 4, False)
    same_params(SILENT[1], params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, r"architectures \['DFlash2DraftModel'\]: not supported"),
        ({"architectures": ["Qwen3DSparkModel"]}, r"architectures \['Qwen3DSparkModel'\]: not supported"),
        ({"dflash_config": ...}, "dflash_config None: must be an object"),
        ({"dflash_config__mask_token_id": ...}, "mask_token_id is missing"),
        ({"dflash_config__target_layer_ids": ...}, "dflash_config: target_layer_ids None: must be a list"),
        ({"dflash_config__target_layer_ids": [1, 2, 8]}, "layer 8 is the last one"),
        ({"dflash_config__target_layer_ids": [1, 2, 9]}, "layer 9 does not exist, the target has 9 layers"),
        ({"dflash_config__selector_rank": 256}, "dflash_config: selector_rank 256: an unknown field"),
        ({"dflash_config__projector_type": "domino"}, "projector_type 'domino': not supported"),
        ({"dflash_config__shift_label": True}, "dflash_config: shift_label True: not supported"),
        ({"dflash_config__attention_mode": "mla"}, "attention_mode 'mla'"),
        ({"dflash_config__output_multiplier": 0.2}, "output_multiplier 0.2"),
        ({"dflash_config__final_logit_softcapping": 20.0}, "final_logit_softcapping 20.0"),
        ({"dflash_config__block_size": 8}, r"block_size \[4, 8\]: must be given once"),
        ({"block_size": ...}, r"block_size \[\]: must be given once"),
        ({"block_size": 1}, "block_size 1: slot 0 predicts nothing"),
        ({"block_size": 4.5}, "block_size 4.5: must be a whole number"),
        ({"is_causal": True}, "is_causal True"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_attention"),
        ({"model_type": "llama"}, "model_type 'llama': these drafters have Qwen3 layers"),
        ({"num_target_layers": ...}, "num_target_layers is missing: .*--target"),
    ],
)
def test_config_faults_name_file_and_field(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        float32(folder)


def test_tensors_that_do_not_belong_are_named(folder):
    edit_tensors(folder, {"layers.0.attention_conv.base_kernel": np.zeros((2, 2, 8), np.float32)})
    with pytest.raises(ValueError, match="unexpected tensor layers.0.attention_conv.base_kernel"):
        float32(folder)
    truncate(folder)
    with pytest.raises(ValueError, match="drafter/model.safetensors: not a readable safetensors file"):
        float32(folder)


def test_a_recurrent_head_is_not_guessed_at():
    with pytest.raises(ValueError, match="markov_head_type 'rnn' with anchor_predicts false"):
        block("rnn", anchor=False)


def drafted(config, params, anchor: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy drafts `[K]` and logits `[K, V]` behind a random context of `start` tokens."""
    rng = np.random.default_rng(7)
    tables = {name: jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32) for name in ("embed", "head")}
    cache = init_draft_cache(config, 1, 16, jnp.float32)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache)

    def draw(logits, slot):
        return jnp.argmax(logits, axis=0), jnp.ones(1), logits

    run = jax.jit(propose, static_argnames=("config", "draw"))
    bound = bind(params, **tables)
    proposal = run(bound, config, cache, jnp.array([anchor]), jnp.array([start]), draw)
    return np.asarray(proposal.tokens[0]), np.asarray(proposal.probs[:, :, 0])


def test_drafts_come_from_the_slots_behind_the_anchor():
    """The same weights, read in both conventions with four slots: slot k's logits are those of draft k and k - 1."""
    config, params = SILENT
    every = replace(config, block_size=4, anchor_predicts=True)
    ours, all_slots = drafted(config, params, 5, 6), drafted(every, params, 5, 6)
    assert ours[0].shape == (3,) and all_slots[0].shape == (4,)
    np.testing.assert_array_equal(ours[0], all_slots[0][1:])
    np.testing.assert_allclose(ours[1], all_slots[1][1:], rtol=1e-5, atol=1e-5)


def test_the_head_reads_the_anchor_before_the_first_draft():
    """Logits of draft k less W2 W1[token before it] are the backbone's, and before draft 0 comes the anchor."""
    config, params = block(confidence=False, anchor=False)
    bare = {name: value for name, value in params.items() if name != "markov"}
    tokens, logits = drafted(config, params, 5, 6)
    base = drafted(replace(config, markov_rank=0, markov_kind="none"), bare, 5, 6)[1]
    previous = [5, *tokens[:-1]]
    bias = params["markov"]["w1"][previous] @ params["markov"]["w2"].T  # [K, V]
    np.testing.assert_allclose(logits, base + bias, rtol=1e-4, atol=1e-4)


def test_training_supervises_the_same_slots():
    config, params = SILENT
    every = replace(config, block_size=4, anchor_predicts=True)
    rng = np.random.default_rng(3)
    ids = jnp.asarray(rng.integers(0, VOCAB, (1, 12)))
    features = jnp.asarray(rng.normal(size=(1, 12, 3 * HIDDEN)), jnp.float32)
    embed = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32)
    anchors, keep = jnp.array([[2, 5]]), jnp.ones((1, 2), bool)

    def hidden(config):
        targets = block_targets(ids, jnp.ones((1, 12)), anchors, keep, config.block_size)
        states = jax.jit(block_forward, static_argnames=("config",))(
            jax.tree.map(jnp.asarray, params), embed, config, features, anchors, keep, targets
        )
        return np.asarray(states.hidden).reshape(HIDDEN, 2, config.block_size)

    np.testing.assert_allclose(hidden(config), hidden(every)[:, :, 1:], rtol=1e-5, atol=1e-5)


def test_greedy_decoding_equals_plain_decoding():
    target, drafter = tiny_target(), tiny_drafter(confidence=False)
    silent = SimpleNamespace(config=replace(drafter.config, anchor_predicts=False), params=drafter.params)
    requests = [Request(str(i), (1 + i, 2, 3), SamplingParams(max_tokens=12)) for i in range(3)]

    def run(drafter):
        done = Generator(target, drafter, batch_size=2, stop_ids=()).generate(requests)
        return {one.id: one.token_ids for one in done}

    assert run(silent) == run(None)
