"""DeepSpec folders: golden drafters bit for bit through both ways, reduced vocabularies, and everything to refuse."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints import deepspec
from dspark_jax.checkpoints.deepspec import config_fields, drafter_shapes, read_drafter, write_drafter
from dspark_jax.drafters.config import CALIBRATION
from dspark_jax.models.config import RopeConfig

DRAFTERS = [
    "drafters/dspark_qwen3_vanilla",
    "drafters/dspark_qwen3_gated",
    "drafters/dspark_qwen3_rnn",
    "drafters/dspark_qwen3_tied_embed_noconf",
    "drafters/dflash_qwen3",
    "drafters/dspark_gemma4_vanilla",
    "drafters/dspark_gemma4_rnn_embed",
    "drafters/dflash_gemma4",
    "inference/dspark_qwen3_vanilla",
    "inference/dspark_qwen3_rnn",
    "inference/dflash_qwen3",
]
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def folder(golden, tmp_path) -> Path:
    """A copy of the vanilla drafter, to be changed."""
    copy = tmp_path / "drafter"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "drafters/dspark_qwen3_vanilla" / name, copy / name)
    return copy


def edit(folder: Path, **fields: object) -> None:
    """Changes config fields; a value of `...` removes the field."""
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes: object) -> None:
    """Replaces tensors, dots written as `__`; a value of `...` removes the tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors.update({name.replace("__", "."): value for name, value in changes.items()})
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items() if value is not ...}
    save_file(tensors, folder / "model.safetensors")


def trim(folder: Path, kept: list[int]) -> np.ndarray:
    """Makes the folder's drafter one whose head covers `kept` only; gives the offsets."""
    tensors = load_file(folder / "model.safetensors")
    offsets = np.array(kept, np.int64) - np.arange(len(kept))
    edit(folder, draft_vocab_size=len(kept))
    edit_tensors(
        folder,
        lm_head__weight=tensors["lm_head.weight"][kept],
        markov_head__markov_w2__weight=tensors["markov_head.markov_w2.weight"][kept],
        d2t=offsets,
    )
    return offsets


@pytest.mark.parametrize("name", DRAFTERS)
def test_golden_drafters_round_trip_bit_for_bit(name, golden, tmp_path):
    config, params = read_drafter(golden / name, jnp.float32)
    write_drafter(tmp_path / "copy", config, params, storage_dtype="float32")
    ours, theirs = load_file(tmp_path / "copy/model.safetensors"), load_file(golden / name / "model.safetensors")
    assert set(ours) == set(theirs) == set(drafter_shapes(config))
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[key], tensor)
    again, read = read_drafter(tmp_path / "copy", jnp.float32)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, read)


@pytest.mark.parametrize("name", DRAFTERS)
def test_written_config_says_what_deepspecs_says(name, golden, tmp_path):
    """Every field that both configs hold is equal, and what only DeepSpec writes does not touch the computation."""
    config, params = read_drafter(golden / name, jnp.float32)
    write_drafter(tmp_path / "copy", config, params, storage_dtype="float32")
    ours = json.loads((tmp_path / "copy/config.json").read_text())
    theirs = json.loads((golden / name / "config.json").read_text())
    if config.family == "gemma4":
        for fields in (ours, theirs):
            fields["rope_parameters"] = fields["rope_parameters"]["full_attention"]
            del fields["head_dim"], fields["num_key_value_heads"]  # of sliding layers, which a drafter has none of
    assert {key: ours[key] for key in theirs.keys() & ours.keys()} == {
        key: theirs[key] for key in theirs.keys() & ours.keys()
    }
    assert theirs.keys() - ours.keys() <= {
        "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "num_anchors",
        "pad_token_id", "sliding_window", "transformers_version", "use_cache", "use_sliding_window",
        "moe_intermediate_size", "num_experts", "num_kv_shared_layers", "target_model_type", "target_text_model_type",
        "top_k_experts", "use_bidirectional_attention", "use_double_wide_mlp", "vocab_size_per_layer_input",
    }  # fmt: skip


def test_config_of_a_golden_drafter(golden):
    config, params = read_drafter(golden / "drafters/dspark_qwen3_rnn", jnp.float32)
    assert (config.block_size, config.num_layers, config.target_layer_ids) == (7, 2, (1, 3, 4))
    assert (config.mask_token_id, config.vocab_size, config.draft_vocab_size) == (299, 300, 300)
    assert (config.markov_rank, config.markov_kind) == (16, "rnn")
    assert (config.confidence, config.confidence_with_markov, config.shares_embeddings) == (True, True, False)
    assert (config.num_target_layers, config.qk_norm, config.rope) == (6, True, RopeConfig(theta=1e6))
    assert jax.tree.map(jnp.shape, {k: v for k, v in params.items() if k != "layers"}) == {
        "fc": (64, 192), "hidden_norm": (64,), "norm": (64,), "embed": (300, 64), "head": (300, 64),
        "markov": {"w1": (300, 16), "w2": (300, 16), "joint_w": (48, 96), "joint_b": (48,)},
        "confidence": {"w": (80,), "b": ()},
    }  # fmt: skip


def test_dflash_has_no_heads(golden):
    config, params = read_drafter(golden / "drafters/dflash_qwen3", jnp.float32)
    assert (config.markov_rank, config.markov_kind, config.confidence) == (0, "none", False)
    assert not {"markov", "confidence", "d2t"} & set(params)


def test_bfloat16_storage_rounds_once(golden, tmp_path):
    config, params = read_drafter(golden / "drafters/dspark_qwen3_gated", jnp.float32)
    write_drafter(tmp_path / "copy", config, params)
    stored = load_file(tmp_path / "copy/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "copy/config.json").read_text())["dtype"] == "bfloat16"
    _, read = read_drafter(tmp_path / "copy", jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b), params, read)


def test_dtype_is_that_of_every_float_array(folder):
    trim(folder, list(range(0, 300, 3)))
    _, params = read_drafter(folder, jnp.bfloat16)
    assert params.pop("d2t").dtype == jnp.int32
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_without_embeddings_the_targets_are_used(golden, tmp_path):
    config, params = read_drafter(golden / "drafters/dspark_qwen3_vanilla", jnp.float32)
    write_drafter(tmp_path / "copy", config, params, storage_dtype="float32", include_embeddings=False)
    assert not set(EMBEDDINGS) & set(load_file(tmp_path / "copy/model.safetensors"))
    again, read = read_drafter(tmp_path / "copy", jnp.float32)
    assert again == replace(config, shares_embeddings=True)
    kept = {name: value for name, value in params.items() if name not in ("embed", "head")}
    jax.tree.map(np.testing.assert_array_equal, kept, read)
    with pytest.raises(ValueError, match="the parameters hold no embed and no head"):
        write_drafter(tmp_path / "more", again, read)


def test_an_embedding_without_a_head_is_refused(folder):
    edit_tensors(folder, lm_head__weight=...)
    with pytest.raises(ValueError, match="missing tensor lm_head.weight"):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("kept", [list(range(0, 300, 2)), [5, 3, 299, 0], list(range(100, 200))])
@pytest.mark.parametrize("absent", [(), ("lm_head__weight",), ("lm_head__weight", "embed_tokens__weight")])
def test_reduced_vocabulary(kept, absent, folder, tmp_path):
    offsets = trim(folder, kept)
    edit_tensors(folder, **dict.fromkeys(absent, ...))
    config, params = read_drafter(folder, jnp.float32)
    assert (config.draft_vocab_size, config.trims_vocabulary) == (len(kept), True)
    assert config.shares_embeddings is ("embed_tokens__weight" in absent)
    assert ("head" in params, "embed" in params) == (not absent, not config.shares_embeddings)
    np.testing.assert_array_equal(params["d2t"] + jnp.arange(len(kept)), kept)
    assert (params["markov"]["w1"].shape, params["markov"]["w2"].shape) == ((300, 16), (len(kept), 16))
    write_drafter(tmp_path / "copy", config, params, storage_dtype="float32", include_embeddings=not absent)
    stored = load_file(tmp_path / "copy/model.safetensors")
    assert stored["d2t"].dtype == np.int64
    np.testing.assert_array_equal(stored["d2t"], offsets)
    again, read = read_drafter(tmp_path / "copy", jnp.float32)
    assert replace(again, shares_embeddings=config.shares_embeddings) == config
    jax.tree.map(np.testing.assert_array_equal, read, {name: params[name] for name in read})


def test_reduced_vocabulary_without_a_map_is_refused(folder):
    trim(folder, list(range(0, 300, 2)))
    edit_tensors(folder, d2t=...)
    with pytest.raises(
        ValueError, match="model.safetensors: tensor d2t is missing: draft_vocab_size 150.*vocab_size 300"
    ):
        read_drafter(folder, jnp.float32)


EVEN = np.arange(0, 300, 2)


@pytest.mark.parametrize(
    "d2t, message",
    [
        (EVEN, r"target ids 0..447, must lie in 0..299 \(d2t holds offsets"),  # target ids in place of offsets
        (-np.arange(150), "two draft ids map to the same target id"),
        (np.full(150, -1), "target ids -1..148"),
        (np.full(150, 151), "target ids 151..300"),
        (np.arange(150).astype(np.float32), "dtype float32, must be an integer type"),
        (np.arange(149), r"tensor d2t has shape \[149\], the config asks for \[150\]"),
    ],
)
def test_a_map_that_is_no_map_is_refused(d2t, message, folder):
    trim(folder, EVEN.tolist())
    edit_tensors(folder, d2t=d2t)
    with pytest.raises(ValueError, match=message):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("shift, accepted", [(0, True), (1, False)])
def test_t2d_must_agree(shift, accepted, folder):
    trim(folder, EVEN.tolist())
    covered = np.zeros(300, bool)
    covered[EVEN + shift] = True
    edit_tensors(folder, t2d=covered)
    if accepted:
        read_drafter(folder, jnp.float32)
    else:
        with pytest.raises(ValueError, match="t2d and d2t name different target tokens"):
            read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("value, accepted", [(0, True), (1, False)])
def test_a_map_of_a_full_vocabulary_must_do_nothing(value, accepted, folder):
    edit_tensors(folder, d2t=np.full(300, value))
    if accepted:
        assert "d2t" not in read_drafter(folder, jnp.float32)[1]
    else:
        with pytest.raises(ValueError, match=r"draft_vocab_size is vocab_size \(300\)"):
            read_drafter(folder, jnp.float32)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architectures": ["DFlashDraftModel"]}, "the anchor slot predicts nothing.*Qwen3DSparkModel"),
        ({"architectures": ["DSparkDraftModel"]}, "SpecForge"),
        (
            {"architectures": ["Gemma4DSparkModel"]},
            "model_type 'qwen3': must be 'gemma4_unified_text' for class Gemma4",
        ),
        ({"architectures": ["Qwen3Eagle3Model"]}, "Eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle3"),
        ({"architectures": ["SomethingDSparkModel"]}, "slot convention is unknown"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "slot convention is unknown"),
        ({"architectures": []}, "slot convention is unknown"),
        ({"architectures": ...}, "architectures None: its slot convention is unknown"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dspark': another project's format"),
        ({"dflash_config": {"mask_token_id": 1}}, "dflash_config .*another project's format"),
        ({"model_type": "llama"}, "model_type 'llama': must be 'qwen3' for class Qwen3DSparkModel"),
    ],
)
def test_slot_convention_is_known_or_the_drafter_refused(fields, message, folder):
    edit(folder, **fields)
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"target_layer_ids": ...}, "target_layer_ids is missing"),
        ({"target_layer_ids": []}, "target_layer_ids is missing or empty"),
        ({"target_layer_ids": [1, 3, 40]}, "layer 40 does not exist, the target has 6 layers"),
        ({"target_layer_ids": [-2, 1, 3]}, "layer -2 does not exist"),
        ({"target_layer_ids": [3, 1, 4]}, "must be strictly increasing"),
        ({"target_layer_ids": [1, 1, 4]}, "must be strictly increasing"),
        ({"target_layer_ids": [1, 3, 5]}, "layer 5 is the last one"),
        ({"target_layer_ids": "1 3 4"}, "must be a list of whole numbers"),
        ({"target_layer_ids": [1.0, 3.0]}, "must be a list of whole numbers"),
        ({"num_target_layers": 5}, "layer 4 is the last one"),
        ({"num_target_layers": ...}, "num_target_layers is missing"),
        ({"block_size": ...}, "block_size is missing"),
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 7.5}, "block_size 7.5: must be a whole number"),
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"mask_token_id": 300}, "mask_token_id 300: outside the vocabulary"),
        ({"mask_token_id": 151669}, "mask_token_id 151669: outside the vocabulary"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"markov_rank": 0}, "confidence_head_with_markov true with markov_rank 0"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ({"draft_vocab_size": 301}, "draft_vocab_size 301"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head 'yes': must be true or false"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"hidden_size": ...}, "hidden_size is missing"),
    ],
)
def test_config_faults_name_file_and_field(fields, message, folder):
    edit(folder, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        read_drafter(folder, jnp.float32)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_hidden_layers": 3, "layer_types": None}, "missing tensors layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "unexpected tensors layers.1"),
        ({"target_layer_ids": [1, 3]}, r"fc.weight has shape \[64, 192\], the config asks for \[64, 128\]"),
        ({"markov_rank": 8}, r"markov_w1.weight has shape \[300, 16\]|proj.weight has shape"),
        ({"markov_head_type": "gated"}, "missing tensors markov_head.gate_proj"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "unexpected tensors markov_head"),
        ({"enable_confidence_head": False}, "unexpected tensors confidence_head"),
        ({"confidence_head_with_markov": False}, r"confidence_head.proj.weight has shape \[1, 80\].*\[1, 64\]"),
        ({"vocab_size": 400}, r"embed_tokens.weight has shape \[300, 64\]"),
        ({"hidden_size": 48}, "the config asks for"),
        ({"head_dim": 16}, "the config asks for"),
    ],
)
def test_config_and_weights_that_do_not_fit(fields, message, folder):
    edit(folder, **fields)
    with pytest.raises(ValueError, match=f"model.safetensors: .*({message})"):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("mask", [0, 150, 298])
def test_any_mask_id_inside_the_padded_vocabulary_is_accepted(mask, folder):
    edit(folder, mask_token_id=mask)
    assert read_drafter(folder, jnp.float32)[0].mask_token_id == mask


@pytest.mark.parametrize(
    "fields, theta",
    [
        ({"rope_parameters": ..., "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}}, 2e6),
        ({"rope_parameters": ...}, 1e4),
    ],
)
def test_rope_theta_in_either_place(fields, theta, folder):
    edit(folder, **fields)
    assert read_drafter(folder, jnp.float32)[0].rope == RopeConfig(theta=theta)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=3e5, kind="linear", factor=2.0),
        RopeConfig(3e5, "llama3", 8.0, 8192, low_freq_factor=2.0, high_freq_factor=5.0),
        RopeConfig(3e5, "yarn", 4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    ],
)
@pytest.mark.parametrize("removed", [(), ("rope_parameters",), ("rope_scaling", "rope_theta")])
def test_rope_scaling_survives_in_both_forms(rope, removed, folder, tmp_path):
    config, params = read_drafter(folder, jnp.float32)
    write_drafter(tmp_path / "copy", replace(config, rope=rope), params)
    edit(tmp_path / "copy", **dict.fromkeys(removed, ...))
    got = read_drafter(tmp_path / "copy", jnp.float32)[0].rope
    if rope.kind == "linear":
        got = replace(got, original_max_position=0)  # of no use to linear scaling
    assert got == rope


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_llama_layers_with_and_without_norms(qk_norm, named, folder, tmp_path):
    config, params = read_drafter(folder, jnp.float32)
    if not qk_norm:
        for layer in params["layers"]:
            del layer["q_norm"], layer["k_norm"]
    llama = replace(config, family="llama", qk_norm=qk_norm)
    write_drafter(tmp_path / "copy", llama, params, storage_dtype="float32")
    if not named:
        edit(tmp_path / "copy", qk_norm=...)
    again, read = read_drafter(tmp_path / "copy", jnp.float32)
    assert again == llama
    jax.tree.map(np.testing.assert_array_equal, params, read)
    assert json.loads((tmp_path / "copy/config.json").read_text())["architectures"] == ["LlamaDSparkModel"]
    edit(tmp_path / "copy", qk_norm=not qk_norm)
    with pytest.raises(ValueError, match="q_norm"):
        read_drafter(tmp_path / "copy", jnp.float32)


@pytest.mark.parametrize("keep", [0, 7, 500, 0.3, 0.99, -1])
def test_truncated_weights_are_named(keep, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="drafter/model.safetensors: not a readable safetensors file"):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_absent_file_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize(
    "name", ["fc__weight", "layers__1__self_attn__k_norm__weight", "markov_head__markov_w2__weight"]
)
def test_missing_tensor_is_named(name, folder):
    edit_tensors(folder, **{name: ...})
    with pytest.raises(ValueError, match=f"missing tensor {name.replace('__', '.')};"):
        read_drafter(folder, jnp.float32)


@pytest.mark.parametrize("name", ["layers__0__layer_scalar", "mask_embedding", "confidence_head__out__weight"])
def test_unexpected_tensor_is_named(name, folder):
    edit_tensors(folder, **{name: np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=f"unexpected tensor {name.replace('__', '.')};"):
        read_drafter(folder, jnp.float32)


def test_extra_fields_are_kept_and_may_not_contradict(folder, tmp_path):
    config, params = read_drafter(folder, jnp.float32)
    write_drafter(tmp_path / "copy", config, params, extra={"num_anchors": 512, "block_size": 7})
    assert json.loads((tmp_path / "copy/config.json").read_text())["num_anchors"] == 512
    with pytest.raises(ValueError, match="extra field block_size 8: the drafter's config says 7"):
        write_drafter(tmp_path / "other", config, params, extra={"block_size": 8})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, p: (replace(c, markov_rank=8), p), "markov_w1.weight has shape"),
        (lambda c, p: (replace(c, num_layers=1), p), "unexpected tensors layers.1"),
        (lambda c, p: (replace(c, confidence=False), p), "unexpected tensors confidence_head"),
        (lambda c, p: (c, {k: v for k, v in p.items() if k != "markov"}), "missing tensors markov_head"),
        (lambda c, p: (replace(c, family="gemma4"), p), "missing tensors layers.0.post_attention_layernorm"),
        (lambda c, p: (replace(c, qk_norm=False), p), "qk_norm false: layers of family qwen3 always have"),
    ],
)
def test_parameters_that_do_not_fit_are_not_written(change, message, folder, tmp_path):
    config, params = change(*read_drafter(folder, jnp.float32))
    with pytest.raises(ValueError, match=message):
        write_drafter(tmp_path / "copy", config, params)
    assert not (tmp_path / "copy").exists()


def test_unknown_storage_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="storage_dtype 'float8': must be one of"):
        write_drafter(tmp_path / "copy", *read_drafter(folder, jnp.float32), storage_dtype="float8")


def test_writing_makes_parents_replaces_and_leaves_nothing_else(folder, tmp_path):
    config, params = read_drafter(folder, jnp.float32)
    out = tmp_path / "a/b/drafter"
    for block in (7, 5):
        write_drafter(out, replace(config, block_size=block), params)
        assert read_drafter(out, jnp.float32)[0].block_size == block
        assert [file.name for file in out.parent.iterdir()] == ["drafter"]
        assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}
    assert out.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777


@pytest.mark.parametrize("stage", ["weights", "config", "rename"])
def test_a_failed_write_leaves_the_old_drafter(stage, folder, monkeypatch):
    config, params = read_drafter(folder, jnp.float32)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*args, **options):
        raise OSError("disk full")

    if stage == "weights":
        monkeypatch.setattr(deepspec, "save_file", fail)
    elif stage == "config":
        monkeypatch.setattr(deepspec.json, "dumps", fail)
    else:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda self, to: fail() if self.name == "new" else rename(self, to))
    with pytest.raises(OSError, match="disk full"):
        write_drafter(folder, replace(config, block_size=5), params)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_a_folder_with_other_files_is_not_replaced(folder):
    config, params = read_drafter(folder, jnp.float32)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds notes.txt, which is no part of a drafter"):
        write_drafter(folder, config, params)
    assert (folder / "notes.txt").read_text() == "mine"


def test_config_fields_are_plain_json(golden):
    for name in DRAFTERS:
        fields = config_fields(read_drafter(golden / name, jnp.float32)[0])
        assert json.loads(json.dumps(fields)) == fields


def test_calibration_of_the_confidence_head_round_trips(folder, tmp_path):
    config, params = read_drafter(folder, jnp.float32)
    assert config.confidence_temperatures == config.confidence_biases == ()
    assert not set(CALIBRATION) & set(config_fields(config))
    temperatures = tuple(0.5 + k / 4 for k in range(config.block_size))
    biases = tuple(0.3 - k / 7 for k in range(config.block_size))
    calibrated = replace(config, confidence_temperatures=temperatures, confidence_biases=biases)
    write_drafter(tmp_path / "copy", calibrated, params, storage_dtype="float32")
    assert read_drafter(tmp_path / "copy", jnp.float32)[0] == calibrated
    before = json.loads((folder / "config.json").read_text())
    deepspec.write_calibration(folder, temperatures, biases)
    added = {"confidence_temperatures": list(temperatures), "confidence_biases": list(biases)}
    assert json.loads((folder / "config.json").read_text()) == before | added
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert read_drafter(folder, jnp.float32)[0] == calibrated
    deepspec.write_calibration(folder, temperatures)  # temperatures alone: the earlier biases would not fit them
    assert read_drafter(folder, jnp.float32)[0] == replace(calibrated, confidence_biases=())
    for nothing in (None, []):
        edit(folder, confidence_temperatures=nothing, confidence_biases=nothing)
        assert read_drafter(folder, jnp.float32)[0] == config


def test_a_calibrated_copy_has_the_same_weights(folder, tmp_path):
    block_size = read_drafter(folder, jnp.float32)[0].block_size
    temperatures, biases = (2.0,) * block_size, (-0.5,) * block_size
    for _ in range(2):  # an older copy is replaced
        deepspec.copy_with_calibration(folder, tmp_path / "copy", temperatures, biases)
    assert (tmp_path / "copy/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    copied = read_drafter(tmp_path / "copy", jnp.float32)[0]
    assert (copied.confidence_temperatures, copied.confidence_biases) == (temperatures, biases)
    assert not set(CALIBRATION) & set(json.loads((folder / "config.json").read_text()))
    (tmp_path / "copy/notes").touch()
    with pytest.raises(ValueError, match="holds notes, which is no part of a drafter"):
        deepspec.copy_with_calibration(folder, tmp_path / "copy", temperatures, biases)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.0", "config field confidence_temperatures '1.0': must be a list of numbers"),
        ([1.0, True], "must be a list of numbers"),
        ([1.0], "must be one for each of block_size"),
        ([0.0] * 7, "must be positive, finite numbers"),
    ],
    ids=str,
)
def test_wrong_temperatures_are_refused(folder, value, message):
    edit(folder, confidence_temperatures=value)
    with pytest.raises(ValueError, match=message):
        read_drafter(folder, jnp.float32)
    edit(folder, confidence_temperatures=...)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match="config.json: confidence_temperatures"):
        deepspec.write_calibration(folder, (1.0, -1.0))
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "config field confidence_biases -1: must be a list of numbers"),
        (["0"] * 7, "must be a list of numbers"),
        ([0.0], "must be one for each of block_size"),
        ([float("inf")] * 7, "must be finite numbers"),
    ],
    ids=str,
)
def test_wrong_biases_are_refused(folder, value, message):
    edit(folder, confidence_biases=value)
    with pytest.raises(ValueError, match=message):
        read_drafter(folder, jnp.float32)
    edit(folder, confidence_biases=...)
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match="config.json: confidence_biases"):
        deepspec.write_calibration(folder, (1.0,) * 7, (0.0, 1.0))
    assert (folder / "config.json").read_bytes() == before
