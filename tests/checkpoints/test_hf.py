"""Hugging Face folders: golden targets, shards, ties, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.hf import count_tokens, read_hf_target, resolve
from dspark_jax.checkpoints.tensors import layer_tensors, target_shapes
from dspark_jax.models.config import RopeConfig

TARGETS = ["llama_tied", "qwen3_tied", "qwen3_untied", "gemma4"]


@pytest.fixture
def folder(golden, tmp_path) -> Path:
    """A copy of the untied Qwen3 target, to be damaged."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "targets/qwen3_untied" / name, tmp_path / name)
    return tmp_path


def edit(folder: Path, **fields: object) -> None:
    """Changes config fields; a value of `...` removes the field."""
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", TARGETS)
def test_golden_targets_hold_their_files_tensors(name, golden):
    config, params = read_hf_target(golden / "targets" / name, jnp.float32)
    stored = load_file(golden / "targets" / name / "model.safetensors")
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    for i, layer in enumerate(params["layers"]):
        tensors |= layer_tensors(layer, f"model.layers.{i}.", config, config.attention(i))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["head"]
    stored = {key.replace("model.language_model.", "model."): tensor for key, tensor in stored.items()}
    assert set(tensors) == set(stored) == set(target_shapes(config))
    for key, tensor in stored.items():
        np.testing.assert_array_equal(np.asarray(tensors[key]), tensor)


def test_fused_layout(golden):
    """Query head g * Q + q is row q of group g; after the queries come the group's key and value."""
    config, params = read_hf_target(golden / "targets/llama_tied", jnp.float32)
    stored = load_file(golden / "targets/llama_tied/model.safetensors")
    q, k, v, o = (stored[f"model.layers.2.self_attn.{name}_proj.weight"] for name in "qkvo")
    hd, per_group = config.head_dim, config.queries_per_group
    qkv, out = np.asarray(params["layers"][2]["qkv"]), np.asarray(params["layers"][2]["o"])
    assert qkv.shape == (2, 5, 8, 48)
    for g in range(2):
        for i in range(per_group):
            rows = slice((g * per_group + i) * hd, (g * per_group + i + 1) * hd)
            np.testing.assert_array_equal(qkv[g, i], q[rows])
            np.testing.assert_array_equal(out[:, g, i], o[:, rows])
        np.testing.assert_array_equal(qkv[g, -2], k[g * hd : (g + 1) * hd])
        np.testing.assert_array_equal(qkv[g, -1], v[g * hd : (g + 1) * hd])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_bfloat16_files_and_every_dtype(dtype, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}, folder / "model.safetensors")
    _, params = read_hf_target(folder, dtype)
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16).astype(dtype)
    np.testing.assert_array_equal(np.asarray(params["final_norm"]), expected)


def shard(folder: Path, parts: int) -> dict[str, str]:
    """Splits the folder's file into shards with an index, and gives the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, folder / file)
        where |= dict.fromkeys(names[i::parts], file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shards_give_the_same_target(parts, folder):
    config, params = read_hf_target(folder, jnp.float32)
    shard(folder, parts)
    again, sharded = read_hf_target(folder, jnp.float32)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, sharded)


def test_broken_shards_are_named(folder):
    where = shard(folder, 3)
    first = where["lm_head.weight"]
    data = (folder / first).read_bytes()
    (folder / first).write_bytes(data[:-10])
    with pytest.raises(ValueError, match=f"{first}: not a readable safetensors file"):
        read_hf_target(folder, jnp.float32)
    (folder / first).unlink()
    with pytest.raises(FileNotFoundError, match=first):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda where: where | {"model.norm.weight": where["lm_head.weight"]}, "model.norm.weight of .* is missing"),
        (lambda where: where | {"extra.weight": where["lm_head.weight"]}, "extra.weight of .* is missing"),
        (lambda where: {k: v for k, v in where.items() if k != "lm_head.weight"}, "lm_head.weight is not listed"),
        (lambda where: where | {"lm_head.weight": "../elsewhere.safetensors"}, "must lie in the same folder"),
        (lambda where: {}, "weight_map must map"),
        (lambda where: ["a"], "weight_map must map"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(change, message, folder):
    where = shard(folder, 3)
    assert where["model.norm.weight"] != where["lm_head.weight"]
    write_index(folder, change(where))
    with pytest.raises(ValueError, match=message):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, 0.5, 0.99, -1])
def test_truncated_weights_are_named(keep, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="model.safetensors: not a readable safetensors file, truncated or corrupt"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize(
    "content", [b"\xff" * 200, b"PK\x03\x04" + bytes(500), b"version https://git-lfs.github.com/spec"]
)
def test_other_content_is_named(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors: not a readable"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "\x00"])
def test_broken_config_is_named(content, folder):
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_absent_file_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_hf_target(folder, jnp.float32)


LAYER = "model.layers.3."


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", LAYER + "self_attn.q_norm.weight", LAYER + "mlp.up_proj.weight"]
)
def test_missing_tensor_is_named(name, folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.safetensors: missing tensor {name};"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize(
    "name",
    [LAYER + "self_attn.q_proj.bias", LAYER + "self_attn.sinks", LAYER + "mlp.experts.0.up_proj.weight", "fc.weight"],
)
def test_unexpected_tensor_is_named(name, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: np.zeros(4, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"unexpected tensor {name};"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize(
    "name, shape",
    [("model.norm.weight", (63,)), ("lm_head.weight", (299, 64)), (LAYER + "mlp.down_proj.weight", (96, 64))],
)
def test_misshaped_tensor_is_named(name, shape, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"tensor {name} has shape \[{', '.join(map(str, shape))}\], the config asks for"
    ):
        read_hf_target(folder, jnp.float32)


def test_rotary_buffers_carry_no_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(12, np.float32)
    save_file(tensors, folder / "model.safetensors")
    read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize("shift, accepted", [(0.0, True), (1e-3, False)])
def test_a_stored_head_of_a_tied_target_must_be_the_embedding(shift, accepted, folder):
    edit(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(shift)
    save_file(tensors, folder / "model.safetensors")
    if accepted:
        assert "head" not in read_hf_target(folder, jnp.float32)[1]
    else:
        with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
            read_hf_target(folder, jnp.float32)


ROPES = [
    ({"rope_parameters": ..., "rope_theta": 5e5}, RopeConfig(theta=5e5)),
    ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
    ({"rope_parameters": ...}, RopeConfig(theta=1e4)),
    ({"rope_parameters": {"rope_theta": 2e6}}, RopeConfig(theta=2e6)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(theta=1e6, kind="linear", factor=2.0)),
]


@pytest.mark.parametrize("fields, rope", ROPES)
def test_rope_settings_in_either_place(fields, rope, folder):
    edit(folder, **fields)
    if "rope_scaling" in fields and fields["rope_scaling"]:
        edit(folder, rope_parameters=..., rope_theta=1e6)
    got = read_hf_target(folder, jnp.float32)[0].rope
    assert (got.theta, got.kind, got.factor) == (rope.theta, rope.kind, rope.factor)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": ...}, "model_type None"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": "six"}, "config.json"),
        ({"num_attention_heads": 5}, "multiple of num_key_value_heads"),
    ],
)
def test_unsupported_config_names_file_and_field(fields, message, folder):
    edit(folder, **fields)
    with pytest.raises(ValueError, match=message) as caught:
        read_hf_target(folder, jnp.float32)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "layers, message", [(5, "unexpected tensors model.layers.5"), (7, "missing tensors model.layers.6")]
)
def test_layer_count_off_by_one(layers, message, folder):
    edit(folder, num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    with pytest.raises(ValueError, match=message + ".* more"):
        read_hf_target(folder, jnp.float32)


@pytest.mark.parametrize(
    "model, added, count",
    [
        ({"vocab": {"a": 0, "b": 1}}, [], 2),
        ({"vocab": {"a": 0, "b": 1}}, [{"id": 250}], 251),
        ({"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, [{"id": 1}], 3),
        ({}, [], None),
    ],
)
def test_padding_rows_are_told_by_the_tokenizer(model, added, count, folder):
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    assert count_tokens(folder / "tokenizer.json") == count
    config, _ = read_hf_target(folder, jnp.float32)
    assert (config.vocab_size, config.num_tokens) == (300, count or 300)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 300}}}))
    with pytest.raises(ValueError, match="vocab_size 300: tokenizer.json beside it has 301 tokens"):
        read_hf_target(folder, jnp.float32)


def test_resolve_takes_what_exists(tmp_path, monkeypatch):
    (tmp_path / "name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("name") == Path("name")


@pytest.mark.parametrize("path", ["/no/such/folder", "./here", "a/b/c", "model.gguf", "~nobody/x y"])
def test_resolve_says_that_a_path_is_absent(path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        resolve(path)


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-of-that-name"])
def test_resolve_says_what_it_tried_on_the_hub(name, monkeypatch):
    import huggingface_hub

    def offline(repo_id: str, allow_patterns: list[str]) -> str:
        assert (repo_id, "*.safetensors" in allow_patterns) == (name, True)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        FileNotFoundError, match=f"{name}: no such local path.*snapshot_download: ConnectionError: no network"
    ):
        resolve(name)


def test_resolve_gives_the_downloaded_folder(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, allow_patterns: str(tmp_path))
    assert resolve("some/model") == tmp_path
