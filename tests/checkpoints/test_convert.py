"""`dspark convert`: round trips between all formats that can hold a drafter, refusals, and the command line."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints import drafters, sglang, specforge, speculators, zlab
from dspark_jax.checkpoints.convert import ConvertSettings, convert, main
from dspark_jax.checkpoints.load import load_drafter, load_target
from dspark_jax.drafters.mtp import MTPConfig
from tests.checkpoints.tiny_drafters import (
    KEPT,
    SIZES,
    VOCAB,
    block,
    eagle,
    edit_tensors,
    filled,
    float32,
    read_config,
    same_files,
    same_params,
    truncate,
)

BOTH = ("embed", "head")
WRITERS = {
    "deepspec": lambda *args, **options: drafters.write_drafter(*args, include_embeddings=None, **options),
    "zlab": zlab.write_drafter,
    "specforge": specforge.write_drafter,
    "speculators": speculators.write_drafter,
    "sglang": sglang.write_drafter,
}
HELD = {  # drafters, and the formats that hold each
    "dspark": (block(), ("deepspec", "specforge", "speculators")),
    "dspark_gated": (block("gated", with_markov=False), ("deepspec", "specforge", "speculators")),
    "dspark_rnn": (block("rnn", confidence=False), ("deepspec", "specforge", "speculators")),
    "dspark_own_tables": (block(own=BOTH), ("deepspec", "speculators")),
    "dspark_reduced": (block(kept=KEPT, own=("head",)), ("speculators",)),
    "dspark_anchor_silent": (block("gated", anchor=False), ("speculators",)),
    "dflash": (block("none", confidence=False), ("deepspec", "specforge", "speculators")),
    "dflash_anchor_silent": (block("none", confidence=False, anchor=False), ("zlab", "speculators")),
    "eagle3": (eagle(), ("sglang", "speculators")),
    "eagle3_own_tables": (eagle(own=BOTH), ("sglang", "speculators")),
    "eagle3_full": (eagle(kept=None), ("sglang", "speculators")),
    "eagle3_qwen3": (eagle(family="qwen3", norm_before_residual=True), ("speculators",)),
    "eagle3_deepspec": (eagle(family="qwen3", kept=None, own=BOTH, ids=(0, 1, 3, 5, 7)), ("deepspec",)),
}


@pytest.fixture
def write(tmp_path):
    """Writes a drafter in a format; gives the folder."""

    def write(drafter, name: str, storage_dtype: str = "bfloat16") -> Path:
        WRITERS[name](tmp_path / name, *drafter, storage_dtype=storage_dtype)
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", HELD)
def test_round_trips_between_all_pairs_are_bit_for_bit(name, write, tmp_path):
    (config, params), formats = HELD[name]
    for one, other in itertools.product(formats, formats):
        source = write((config, params), one, "float16" if one == "sglang" else "bfloat16")
        if one == "sglang":  # half precision has other values
            params = float32(source)[1]
        there, back = tmp_path / f"{one}_{other}", tmp_path / f"{one}_{other}_{one}"
        done = convert(ConvertSettings(source=str(source), output=there, format=other))
        assert (done["source_format"], done["format"]) == (one, other)
        read, weights = float32(there)
        assert read == replace(config, shares_embeddings="embed" not in params)
        same_params(params, weights)
        convert(ConvertSettings(str(there), back, one))
        same_files(source, back)


def test_the_map_of_a_reduced_vocabulary_survives(write, tmp_path):
    source = write(eagle(), "sglang")
    convert(ConvertSettings(str(source), tmp_path / "out", "speculators"))
    for folder in (source, tmp_path / "out"):
        tensors = load_file(folder / "model.safetensors")
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
        np.testing.assert_array_equal(tensors["d2t"], [0, 0, 1, 1, 5, 5, 5, 10, 14])
        np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), KEPT)
        assert tensors["t2d"].shape == (VOCAB,)


MTP = MTPConfig(3, (), draft_vocab_size=VOCAB, shares_embeddings=True, qk_norm=False, family="llama", **SIZES)
LLAMA = replace(block()[0], family="llama")
REFUSED = [
    ("zlab", block("none", confidence=False), "anchor_predicts true: .*slot 0 predicts nothing.*not interchangeable"),
    ("zlab", block(confidence=False, anchor=False), "markov_rank 4: z-lab's DFlash format has no Markov head"),
    ("zlab", block("none", anchor=False), "enable_confidence_head true: .*no confidence head"),
    ("zlab", block("none", confidence=False, anchor=False, kept=KEPT), "draft_vocab_size 9: .*no reduced vocabulary"),
    ("zlab", block("none", confidence=False, anchor=False, own=BOTH), "own embed and head: .*--target"),
    ("zlab", eagle(), "type Eagle3Config: z-lab's DFlash format holds DSpark and DFlash drafters only"),
    ("specforge", block(anchor=False), "anchor_predicts false: in SpecForge's DSpark format.*not interchangeable"),
    ("specforge", block(kept=KEPT), "draft_vocab_size 9: what W2 spans in SpecForge's"),
    ("specforge", block(own=("head",)), "own head: SpecForge's DSpark format has no place for them"),
    ("specforge", filled(LLAMA, None, ()), "family 'llama': SpecForge's DSpark format has layers"),
    ("specforge", eagle(), "type Eagle3Config: SpecForge"),
    ("deepspec", block(anchor=False), "anchor_predicts false: in DeepSpec's format.*not interchangeable"),
    ("deepspec", block(kept=KEPT), "draft_vocab_size 9: DeepSpec's format has no reduced vocabulary.*24"),
    ("deepspec", filled(LLAMA, None, ()), "family 'llama': DeepSpec has classes for qwen3 and gemma4 only"),
    ("deepspec", eagle(family="qwen3", kept=None), r"target_layer_ids \[1, 3, 5\]: .*exactly 5 layers"),
    ("deepspec", eagle(family="qwen3"), "draft_vocab_size 9: DeepSpec's format has no reduced vocabulary"),
    (
        "deepspec",
        eagle(family="qwen3", kept=None, ids=(0, 1, 2, 3, 4), norm_before_residual=True),
        "norm_before_residual true",
    ),
    ("deepspec", filled(MTP, None, ()), "type MTPConfig: DeepSpec's format holds DSpark, DFlash and Eagle3"),
    ("speculators", filled(LLAMA, None, ()), "family 'llama': speculators' format has layers"),
    ("speculators", filled(MTP, None, ()), "type MTPConfig: speculators' format is written for"),
    ("speculators", block(kept=KEPT), "draft_vocab_size 9 without a head of the drafter's own.*--target"),
    ("speculators", eagle(own=()), "draft_vocab_size 9 without a head"),
    ("speculators", eagle(ids=(0, 1, 2, 3, 4)), r"target_layer_ids \[0, 1, 2, 3, 4\]: .*exactly 3 layers"),
    ("sglang", block(), "type DrafterConfig: SGLang's Eagle3 format holds Eagle3 drafters only"),
    ("sglang", eagle(family="qwen3"), "family 'qwen3' with qk_norm True: .*without q and k norms"),
    ("sglang", eagle(ids=(0, 1, 2, 3, 4)), r"target_layer_ids \[0, 1, 2, 3, 4\]: .*exactly 3 layers"),
    ("sglang", eagle(norm_before_residual=True), "norm_before_residual true: SGLang"),
    ("sglang", eagle(own=()), "draft_vocab_size 9 without a head"),
]


@pytest.mark.parametrize(("name", "drafter", "message"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_by_name(name, drafter, message, tmp_path, monkeypatch):
    """The writers' own refusals: `convert` reaches them with whatever a source holds."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("dspark_jax.checkpoints.drafters.read_drafter", lambda *args: drafter)
    monkeypatch.setattr("dspark_jax.checkpoints.foreign.RenamedStore.__init__", lambda self, folder: None)
    monkeypatch.setattr("dspark_jax.checkpoints.foreign.RenamedStore.storage_dtype", lambda self: "float32")
    with pytest.raises(ValueError, match=message):
        convert(ConvertSettings(str(tmp_path), tmp_path / "out", name))
    assert not (tmp_path / "out").exists()


def test_the_targets_tables_are_left_out_and_put_back(golden, tmp_path):
    source, target = golden / "drafters/dspark_qwen3_vanilla", str(golden / "targets/qwen3_untied")
    convert(ConvertSettings(str(source), tmp_path / "there", "specforge", target))
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "there/model.safetensors"))
    done = convert(ConvertSettings(str(tmp_path / "there"), tmp_path / "back", "deepspec", target))
    assert (done["storage_dtype"], done["own_embedding"], done["own_head"]) == ("float32", True, True)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    with pytest.raises(ValueError, match="hidden_size is 64 in the drafter, 48 in the target"):
        other = str(golden / "targets/llama_tied")
        convert(ConvertSettings(str(source), tmp_path / "no", "specforge", other))


def test_tables_that_differ_from_the_targets_are_not_left_out(golden, tmp_path):
    config, params = load_drafter(golden / "drafters/dspark_qwen3_vanilla").config, None
    params = dict(load_drafter(golden / "drafters/dspark_qwen3_vanilla").params)
    params["head"] = params["head"] + 1
    drafters.write_drafter(tmp_path / "d", config, params, storage_dtype="float32")
    with pytest.raises(ValueError, match="own head differs from that of .*qwen3_untied"):
        convert(ConvertSettings(str(tmp_path / "d"), tmp_path / "o", "specforge", str(golden / "targets/qwen3_untied")))


def test_rows_of_the_targets_head_complete_a_reduced_vocabulary(golden, tmp_path):
    target = load_target(golden / "targets/qwen3_untied")
    drafter = load_drafter(golden / "drafters/dspark_qwen3_vanilla")
    kept = np.array([2, 3, 50, 51, 299])
    markov = drafter.params["markov"] | {"w2": drafter.params["markov"]["w2"][kept]}
    params = {k: v for k, v in drafter.params.items() if k not in BOTH}
    params |= {"markov": markov, "d2t": jnp.asarray(kept - np.arange(5), jnp.int32)}
    config = replace(drafter.config, draft_vocab_size=5, shares_embeddings=True)
    drafters.write_drafter(tmp_path / "d", config, params, storage_dtype="float32", include_embeddings=False)
    convert(ConvertSettings(str(tmp_path / "d"), tmp_path / "o", "speculators", str(target.path)))
    read, weights = float32(tmp_path / "o")
    assert (read.draft_vocab_size, read.anchor_predicts) == (5, True)
    np.testing.assert_array_equal(weights["head"], target.params["head"][kept])
    verifier = read_config(tmp_path / "o")["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target.path), "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize("name", ["deepspec", "zlab", "specforge", "speculators", "sglang"])
def test_load_drafter_reads_every_format_and_says_so(name, write, caplog):
    drafter = next(drafter for drafter, formats in HELD.values() if name in formats)
    folder = write(drafter, name)
    with caplog.at_level(logging.INFO):
        loaded = load_drafter(folder)
    assert loaded.config == drafter[0]
    (line,) = caplog.messages
    assert f"drafter in {drafters.TITLES[name]} format; " in line
    if name == "zlab":
        assert "slot 0 is the anchor and predicts nothing: 4 slots give 3 drafts" in line
    truncate(folder)
    with pytest.raises(ValueError, match=f"{name}/model.safetensors: not a readable safetensors file, truncated"):
        load_drafter(folder)


def test_command_line(write, tmp_path, capsys):
    source = write(block(), "deepspec")
    out, report = tmp_path / "out", tmp_path / "report.json"
    assert main([str(source), str(out), "--format", "specforge", "--json", str(report)]) == 0
    done = json.loads(report.read_text())
    assert (done["source_format"], done["format"], done["drafter"]) == ("deepspec", "specforge", "Drafter")
    assert done["storage_dtype"] == "bfloat16" and done["parameters"] > 0
    assert main([str(source), str(tmp_path / "no"), "--format", "zlab"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("dspark convert: error: anchor_predicts true")
    assert main([str(tmp_path / "nothing"), str(out), "--format", "zlab"]) == 2
    with pytest.raises(SystemExit):
        main([str(source), str(out), "--format", "onnx"])


def test_mixed_storage_becomes_float32(write, tmp_path):
    source = write(block(), "deepspec")
    edit_tensors(source, {"norm.weight": np.full(8, 1.001, np.float32)})
    done = convert(ConvertSettings(str(source), tmp_path / "out", "specforge"))
    assert done["storage_dtype"] == "float32"
    assert load_file(tmp_path / "out/model.safetensors")["norm.weight"][0] == np.float32(1.001)


EXPECTED = {  # what facts.md lists for DeepSpec's DSpark, beside the layers; D = 8, m = 3, r = 4
    "embed_tokens.weight": (VOCAB, 8),
    "lm_head.weight": (VOCAB, 8),
    "norm.weight": (8,),
    "fc.weight": (8, 24),
    "hidden_norm.weight": (8,),
    "markov_head.markov_w1.weight": (VOCAB, 4),
    "markov_head.markov_w2.weight": (VOCAB, 4),
    "confidence_head.proj.weight": (1, 12),
    "confidence_head.proj.bias": (1,),
}
EXPECTED_LAYER = {
    "self_attn.q_proj.weight": (24, 8),
    "self_attn.k_proj.weight": (12, 8),
    "self_attn.v_proj.weight": (12, 8),
    "self_attn.o_proj.weight": (8, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}


def test_deepspecs_names_shapes_and_dtypes(write, tmp_path):
    source = write(block(own=BOTH), "speculators")
    convert(ConvertSettings(str(source), tmp_path / "out", "deepspec"))
    stored = load_file(tmp_path / "out/model.safetensors")
    layers = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in EXPECTED_LAYER.items()}
    assert {name: tensor.shape for name, tensor in stored.items()} == EXPECTED | layers
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}


def expected_module(torch, rank: int, kind: str):
    """A DSpark drafter of DeepSpec as facts.md lists its tensors, of the sizes of the tiny drafters."""
    nn = torch.nn

    class Weight(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))

    def linear(inputs: int, outputs: int, bias: bool = False):
        return nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)

    d, f, heads, groups, hd = 8, 12, 4, 2, 6

    def layer():
        attention = {"q_proj": linear(d, heads * hd), "o_proj": linear(heads * hd, d)}
        attention |= {"k_proj": linear(d, groups * hd), "v_proj": linear(d, groups * hd)}
        attention |= {"q_norm": Weight(hd), "k_norm": Weight(hd)}
        mlp = {"gate_proj": linear(d, f), "up_proj": linear(d, f), "down_proj": linear(f, d)}
        norms = {"input_layernorm": Weight(d), "post_attention_layernorm": Weight(d)}
        return nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})

    markov = {"markov_w1": Weight(VOCAB, rank), "markov_w2": linear(rank, VOCAB)}
    if kind == "gated":
        markov["gate_proj"] = linear(d + rank, rank, bias=True)
    if kind == "rnn":
        markov["joint_proj"] = linear(2 * rank + d, 3 * rank, bias=True)
    parts = {
        "embed_tokens": Weight(VOCAB, d),
        "lm_head": linear(d, VOCAB),
        "norm": Weight(d),
        "fc": linear(3 * d, d),
        "hidden_norm": Weight(d),
        "layers": nn.ModuleList([layer(), layer()]),
        "markov_head": nn.ModuleDict(markov),
        "confidence_head": nn.ModuleDict({"proj": linear(d + rank, 1, bias=True)}),
    }
    return nn.ModuleDict(parts)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_deepspecs_names_shapes_and_dtypes_load_strictly_into_torch(kind, write, tmp_path):
    torch = pytest.importorskip("torch")
    source = write(block(kind, own=BOTH), "speculators")
    convert(ConvertSettings(str(source), tmp_path / "out", "deepspec"))
    stored = load_file(tmp_path / "out/model.safetensors")
    state = {k: torch.from_numpy(v.astype(np.float32)).to(torch.bfloat16) for k, v in stored.items()}
    module = expected_module(torch, 4, kind)
    module.load_state_dict(state, strict=True)
    for name, tensor in module.state_dict().items():
        assert (tuple(tensor.shape), tensor.dtype) == (stored[name].shape, torch.bfloat16)
