"""SpecForge's DSpark: everything under `dflash_config`, older layouts of it, and everything to refuse."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import specforge
from tests.checkpoints.tiny_drafters import (
    KEPT,
    VOCAB,
    block,
    edit,
    edit_tensors,
    float32,
    read_config,
    same_params,
    truncate,
)

DRAFTER = block()


@pytest.fixture
def folder(tmp_path):
    """A drafter in SpecForge's format, to be changed."""
    specforge.write_drafter(tmp_path / "drafter", *DRAFTER)
    return tmp_path / "drafter"


def test_the_written_config_is_that_of_specforge(folder):
    config = read_config(folder)
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"] == {
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [-1, 2, 6],
        "projector_type": "dspark",
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert config["block_size"] == 3  # every slot gives a draft
    heads = {name for name in load_file(folder / "model.safetensors") if "head" in name}
    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert heads == markov | {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["DFlashDraftModel"]},  # older configs
        {"dflash_config__confidence_head_alpha": 1.0, "dflash_config__attention_mode": "gqa"},
        {"dflash_config__shift_label": True},
        {"dflash_config__markov_rank": ..., "markov_rank": 4},
        {  # what the weights say
            "dflash_config__markov_rank": ...,
            "dflash_config__markov_head_type": ...,
            "dflash_config__enable_confidence_head": ...,
            "dflash_config__confidence_head_with_markov": ...,
        },
    ],
)
def test_layouts_of_the_same_drafter(changes, folder):
    edit(folder, **changes)
    config, params = float32(folder)
    assert config == DRAFTER[0]
    same_params(DRAFTER[1], params)


@pytest.mark.parametrize("kind", ["none", "gated", "rnn"])
def test_heads_are_known_by_their_weights(kind, tmp_path):
    drafter = block(kind, confidence=kind != "none", with_markov=False)
    specforge.write_drafter(tmp_path / "drafter", *drafter)
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    edit(tmp_path / "drafter", **{f"dflash_config__{name}": ... for name in names})
    assert float32(tmp_path / "drafter")[0] == drafter[0]


def test_heads_under_their_oldest_names(folder):
    tensors = load_file(folder / "model.safetensors")
    old = {f"logit_head.{name}": tensor for name, tensor in tensors.items() if "_head." in name}
    edit_tensors(folder, old | {name.removeprefix("logit_head."): ... for name in old})
    same_params(DRAFTER[1], float32(folder)[1])
    edit_tensors(folder, {"markov_head.markov_w1.weight": tensors["markov_head.markov_w1.weight"]})
    with pytest.raises(ValueError, match="are both markov_head.markov_w1.weight"):
        float32(folder)


def test_a_reduced_vocabulary_is_read_where_its_map_lies_beside(folder):
    offsets = np.array(KEPT) - np.arange(len(KEPT))
    w2 = load_file(folder / "model.safetensors")["markov_head.markov_w2.weight"][KEPT]
    edit(folder, draft_vocab_size=len(KEPT))
    with pytest.raises(ValueError, match="tensor d2t is missing: draft_vocab_size 9"):
        float32(folder)
    edit_tensors(folder, {"markov_head.markov_w2.weight": w2, "d2t": offsets})
    config, params = float32(folder)
    assert (config.draft_vocab_size, "head" in params) == (len(KEPT), False)
    np.testing.assert_array_equal(params["d2t"] + np.arange(len(KEPT)), KEPT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config__projector_type": ...}, "projector_type None: must be 'dspark'"),
        ({"dflash_config__projector_type": "domino"}, "projector_type 'domino': must be 'dspark'"),
        ({"dflash_config__shift_label": False}, "shift_label False: not supported"),
        ({"dflash_config__causal": True}, "dflash_config: causal True"),
        ({"dflash_config__mlp_type": "moe"}, "dflash_config: mlp_type 'moe': an unknown field"),
        ({"markov_rank": 8}, "markov_rank: said twice, 4 and 8"),
        ({"dflash_config__mask_token_id": VOCAB}, "mask_token_id 24: outside the vocabulary"),
        ({"dflash_config__markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ({"num_target_layers": ...}, "num_target_layers is missing"),
        ({"model_type": "glm"}, "model_type 'glm'"),
    ],
)
def test_config_faults_name_file_and_field(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        float32(folder)


def test_truncated_weights_are_named(folder):
    truncate(folder)
    with pytest.raises(ValueError, match="drafter/model.safetensors: not a readable safetensors file"):
        float32(folder)
