"""speculators: nested layers, ids counted from the embedding, the slot convention as a field, and what to refuse."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import speculators
from dspark_jax.checkpoints.drafters import read_drafter
from tests.checkpoints.tiny_drafters import (
    HIDDEN,
    KEPT,
    TARGET_LAYERS,
    VOCAB,
    block,
    eagle,
    edit,
    edit_tensors,
    float32,
    read_config,
    same_params,
    truncate,
)

DSPARK = block(kept=KEPT, own=("head",))
DFLASH = block("none", confidence=False, anchor=False)
EAGLE = eagle()


@pytest.fixture
def write(tmp_path):
    """Writes a drafter in speculators' format; gives the folder."""

    def write(drafter):
        speculators.write_drafter(tmp_path / "drafter", *drafter)
        return tmp_path / "drafter"

    return write


def test_a_written_dspark_config(write):
    config = read_config(write(DSPARK))
    assert (config["speculators_model_type"], config["architectures"]) == ("dspark", ["DSparkSpeculator"])
    assert config["aux_hidden_state_layer_ids"] == [0, 3, 7]  # of layers -1, 2 and 6
    assert (config["draft_vocab_size"], config["block_size"], config["sample_from_anchor"]) == (len(KEPT), 3, True)
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert config["speculators_config"]["verifier"] == {"name_or_path": None, "architectures": []}
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("qwen3", 2, VOCAB)


def test_a_written_dflash_config_counts_the_anchors_slot(write):
    config = read_config(write(DFLASH))
    assert (config["speculators_model_type"], config["sample_from_anchor"]) == ("dflash", False)
    assert config["block_size"] == 4
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert not {"markov_rank", "enable_confidence_head"} & config.keys()


@pytest.mark.parametrize("drafter", [DSPARK, DFLASH, EAGLE], ids=["dspark", "dflash", "eagle3"])
def test_layers_of_the_target_may_come_from_the_target(drafter, write, golden):
    folder = write(drafter)
    edit(folder, num_target_layers=...)
    with pytest.raises(ValueError, match="config.json: num_target_layers is missing.*--target"):
        float32(folder)
    from dspark_jax.checkpoints.hf import read_hf_config

    target = replace(read_hf_config(golden / "targets/qwen3_untied"), num_layers=TARGET_LAYERS)
    assert read_drafter(folder, jnp.float32, target)[0] == drafter[0]
    edit(folder, num_target_layers=TARGET_LAYERS + 1)
    with pytest.raises(ValueError, match="num_target_layers 10: the target has 9 layers"):
        read_drafter(folder, jnp.float32, target)


def test_the_slot_convention_of_dflash_is_older_than_its_field(write):
    folder = write(DFLASH)
    edit(folder, sample_from_anchor=...)
    assert float32(folder)[0] == DFLASH[0]
    edit(folder, sample_from_anchor=True)
    assert float32(folder)[0] == replace(DFLASH[0], block_size=4, anchor_predicts=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_rank": ..., "markov_head_type": ..., "enable_confidence_head": ..., "draft_vocab_size": ...},
        {"transformer_layer_config__model_type": "llama"},  # the layers are Qwen3's all the same
        {"transformer_layer_config__rope_parameters": ..., "speculators_config": None},
    ],
)
def test_what_a_dspark_config_leaves_out_is_in_the_weights(changes, write):
    folder = write(DSPARK)
    edit(folder, **changes)
    config, params = float32(folder)
    assert config == DSPARK[0]
    same_params(DSPARK[1], params)


def test_tables_for_training_are_left_out(write):
    folder = write(DSPARK)
    verifier = {"verifier_norm.weight": np.ones(HIDDEN), "verifier_lm_head.weight": np.ones((len(KEPT), HIDDEN))}
    edit_tensors(folder, {name: tensor.astype(np.float32) for name, tensor in verifier.items()})
    same_params(DSPARK[1], float32(folder)[1])


def test_nested_configs_leave_out_their_classs_defaults():
    transformers = pytest.importorskip("transformers")
    for kind, config in (("qwen3", transformers.Qwen3Config()), ("llama", transformers.LlamaConfig())):
        for name, value in speculators._DEFAULTS[kind].items():
            assert getattr(config, name) == value


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_eagle3(norm_before_residual, write):
    drafter = eagle(norm_before_residual=norm_before_residual)
    folder = write(drafter)
    config = read_config(folder)
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3Speculator"])
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["norm_before_residual"] is norm_before_residual
    assert {"layers.0.hidden_norm.weight", "fc.weight", "d2t", "t2d"} <= load_file(folder / "model.safetensors").keys()
    assert float32(folder)[0] == drafter[0]


def test_eagle3_without_layer_ids_reads_the_default_ones(write):
    folder = write(EAGLE)
    edit(folder, eagle_aux_hidden_state_layer_ids=None, speculators_config__proposal_methods=[])
    config = float32(folder)[0]
    assert config.target_layer_ids == (1, 3, 5)  # inputs of layers 2, 9 // 2 and 9 - 3
    assert config.block_size == 7


@pytest.mark.parametrize(
    ("drafter", "changes", "message"),
    [
        (DSPARK, {"speculators_model_type": "mtp"}, "speculators_model_type 'mtp': not supported"),
        (DSPARK, {"sample_from_anchor": ...}, "sample_from_anchor is missing: DSpark files without it exist in both"),
        (DSPARK, {"sample_from_anchor": "no"}, "sample_from_anchor 'no': must be true or false"),
        (DSPARK, {"transformer_layer_config": ...}, "transformer_layer_config None: must be an object"),
        (DSPARK, {"transformer_layer_config__model_type": "gemma4"}, "model_type 'gemma4': not supported"),
        (DSPARK, {"transformer_layer_config__layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        (DSPARK, {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        (DSPARK, {"target_hidden_size": 16}, r"target_hidden_size 16: not supported, .*\[None, 8\]"),
        (DSPARK, {"enable_correction_head": True}, "enable_correction_head True"),
        (DSPARK, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids None: must be a list"),
        (DSPARK, {"aux_hidden_state_layer_ids": [1, 3, 9]}, "layer 8 is the last one"),
        (DSPARK, {"mask_token_id": None}, "mask_token_id is missing"),
        (DFLASH, {"projector_type": "domino"}, "projector_type 'domino'"),
        (DFLASH, {"shift_label": True}, "shift_label True"),
        (EAGLE, {"norm_before_residual": ...}, "norm_before_residual None: must be true or false, readers differ"),
        (EAGLE, {"norm_before_fc": True}, "norm_before_fc True"),
        (EAGLE, {"fc_norm": True}, "fc_norm True"),
        (EAGLE, {"norm_output": True}, "norm_output True"),
        (EAGLE, {"transformer_layer_config__num_hidden_layers": 2}, "num_hidden_layers 2: .*exactly one layer"),
    ],
)
def test_config_faults_name_file_and_field(drafter, changes, message, write):
    folder = write(drafter)
    edit(folder, **changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        float32(folder)


def test_damaged_weights_are_named(write):
    folder = write(DSPARK)
    edit_tensors(folder, {"t2d": np.roll(load_file(folder / "model.safetensors")["t2d"], 1)})
    with pytest.raises(ValueError, match="t2d and d2t name different target tokens"):
        float32(folder)
    edit_tensors(folder, {"d2t": ..., "t2d": ...})
    with pytest.raises(ValueError, match="tensor d2t is missing"):
        float32(folder)
    truncate(folder)
    with pytest.raises(ValueError, match="drafter/model.safetensors: not a readable safetensors file"):
        float32(folder)
