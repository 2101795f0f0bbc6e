"""The doctor: every kind of fault on a copied checkpoint is told, all of them at once, and causes are found by running.

Files are those of the golden Qwen3 pair. Its layers are so alike that other layer ids hardly change what is accepted,
so the suspects are tried on a pair that is built for it: a drafter that is right with its own ids and lost with others.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints import load
from dspark_jax.checkpoints.load import Drafter
from dspark_jax.decoding.generate import Completion
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.dspark import init_params as init_drafter
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.transformer import init_params
from dspark_jax.serving import doctor, doctor_trial
from dspark_jax.serving.doctor_checks import Finding
from tests.decoding.tiny import SIZES
from tests.serving.conftest import copy_model

DRAFTS = np.sort(np.random.default_rng(0).permutation(257)[:120])  # target ids of a reduced draft vocabulary
TOKENS, LAYERS, HALF = 12, 5, SIZES["hidden_size"] // 2


@pytest.fixture
def drafter(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden drafter, to be damaged."""
    return copy_model(golden / "inference/dspark_qwen3_vanilla", tmp_path / "drafter")


def edit(folder: Path, **fields: Any) -> None:
    """Changes fields of a `config.json`; None takes one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes tensors, by name with `__` for dots: to a new array, or by a function of the old one."""
    tensors = load_file(folder / "model.safetensors")
    for key, change in changes.items():
        name = key.replace("__", ".")
        tensors[name] = np.ascontiguousarray(change(tensors[name]) if callable(change) else change)
    save_file(tensors, folder / "model.safetensors")


def reduce_vocabulary(folder: Path, ids: np.ndarray, offsets: np.ndarray | None = None) -> None:
    """Trims a drafter to the target tokens `ids`; `offsets` replaces the right map."""
    edit(folder, draft_vocab_size=len(ids))
    keep = {
        name: lambda table: table[np.clip(ids, 0, None)]
        for name in ("lm_head__weight", "markov_head__markov_w2__weight")
    }
    right = ids - np.arange(len(ids))
    rewrite(folder, d2t=(right if offsets is None else offsets).astype(np.int64), **keep)


def examine(target: Path, drafter: Path, *words: str) -> tuple[int, list[Finding], dict[str, Any]]:
    """The exit code, the findings and the report of a run on files (`--no-run` unless there are `words`)."""
    file = drafter.parent / "report.json"
    options = ["--json", str(file), "--dtype", "float32", *(words or ("--no-run",))]
    code = doctor.main([str(target), str(drafter), *options])
    report = json.loads(file.read_text())
    assert report["exit_code"] == code
    return code, [Finding(**finding) for finding in report.get("findings", ())], report


def told(findings: list[Finding], name: str) -> Finding:
    """The one finding of that name that is not ok, or else the one that is."""
    named = [finding for finding in findings if finding.name == name]
    return next((finding for finding in named if finding.status != "ok"), named[0])


def test_a_pair_that_fits_runs_and_is_fine(target_folder, drafter, capsys) -> None:
    code, findings, report = examine(target_folder, drafter, "--max-tokens", "24", "--prompt", "tulips")
    assert code == 0 and report["wrong"] == 0
    assert [f.name for f in findings if f.status == "warning"] == ["mask_token_id"]  # ' w299', plain text here
    trial = report["trial"]
    assert trial["tokens"] == 24 and trial["accepted_length"] == round(23 / trial["rounds"], 4)
    assert len(trial["acceptance_by_position"]) == 7
    assert trial["rounds"] - trial["reached_by_position"][0] in (0, 1)  # the last round may have no room for drafts
    assert "same 24 tokens" in told(findings, "same text").message
    out = capsys.readouterr().out
    assert out.count("\n") == len(findings) + 5 and "they belong together: 0 wrong, 1 warning\n" in out


def test_options_change_the_trial(target_folder, drafter, monkeypatch) -> None:
    """Another prompt has another answer, and causes are looked for where a run is fine only for the asking."""
    monkeypatch.setattr(doctor_trial, "diagnose", lambda *args: [Finding("looked", "ok", "")])
    texts, looked = [], []
    for words in ((), ("--prompt", "tulips"), ("--suspects",)):
        _, findings, report = examine(target_folder, drafter, "--max-tokens", "8", *words)
        texts.append(report["trial"]["text"])
        looked.append("looked" in {finding.name for finding in findings})
    assert texts[0] == texts[2] != texts[1]
    assert not looked[0] and looked[2]


def test_weights_have_the_dtype_that_is_asked_for(target_folder, drafter) -> None:
    for dtype in ("float32", "bfloat16"):
        settings = doctor.DoctorSettings(str(target_folder), str(drafter), dtype=dtype)  # type: ignore[arg-type]
        assert str(doctor.read_both(settings)[0].params["embed"].dtype) == dtype


CONFIG_FAULTS = {
    "hidden_size": ({"hidden_size": 48}, "wrong", "48 in the drafter, 64 in the target"),
    "vocab_size": ({"vocab_size": 310}, "wrong", "310 in the drafter, 300 in the target"),
    "num_target_layers": ({"num_target_layers": 7}, "wrong", "7 in the drafter, 6 in the target"),
    "target_layer_ids": ({"target_layer_ids": [1, 3, 9]}, "wrong", "layer 9 does not exist, the target has 6 layers"),
    "target_layer_ids last": ({"target_layer_ids": [1, 3, 5]}, "wrong", "layer 5 is the last one"),
    "target_layer_ids order": ({"target_layer_ids": [3, 1, 4]}, "wrong", "must be strictly increasing"),
    "target_layer_ids none": ({"target_layer_ids": None}, "wrong", "missing; right would be ids of 0..4"),
    "fc.weight": ({"target_layer_ids": [1, 4]}, "wrong", "reads 192 values, 2 layers of 64 have 128"),
    "block_size": ({"block_size": None}, "wrong", "right would be the number of draft tokens"),
    "mask_token_id": ({"mask_token_id": 300}, "wrong", "300, must lie in 0..299"),
    "mask_token_id prompt": ({"mask_token_id": 256}, "wrong", "'<|im_start|>') occurs in the prompt"),
    "mask_token_id stop": ({"mask_token_id": 257}, "wrong", "257 ends an answer"),
    "rope theta": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "warning", "10000.0 in"),
    "rope scaling": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
        "warning",
        "linear, factor 2 in the drafter, default, factor 1 in the target",
    ),
    "head_dim": ({"head_dim": 16}, "warning", "16 in the drafter, 24 in the target"),
    "max_position_embeddings": ({"max_position_embeddings": 128}, "warning", "128 in the drafter, 512 in the target"),
    "dtype": ({"dtype": "bfloat16"}, "warning", "['float32'], config.json says bfloat16"),
    "draft vocabulary": ({"draft_vocab_size": 100}, "wrong", "100 of 300 tokens, but no map"),
    "format": ({"architectures": ["SomeoneElsesModel"]}, "wrong", "nobody knows whether its anchor predicts"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_of_the_config(fault: str, target_folder, drafter) -> None:
    fields, status, message = CONFIG_FAULTS[fault]
    edit(drafter, **fields)
    code, findings, _ = examine(target_folder, drafter)
    found = told(findings, fault.split(" ")[0] if fault.startswith(("target_layer", "mask")) else fault)
    assert found.status == status and message in found.message
    assert code == int(any(finding.status == "wrong" for finding in findings))


def test_all_faults_are_told_at_once(target_folder, drafter, capsys) -> None:
    edit(drafter, hidden_size=48, vocab_size=310, num_target_layers=40, target_layer_ids=[1, 3, 9], mask_token_id=900)
    rewrite(drafter, norm__weight=lambda x: x * np.nan)
    code, findings, _ = examine(target_folder, drafter, "--max-tokens", "8")
    wrong = {finding.name for finding in findings if finding.status == "wrong"}
    fields = {"hidden_size", "vocab_size", "num_target_layers", "target_layer_ids", "mask_token_id"}
    assert code == 1 and wrong >= fields | {"drafter weights", "loads"}
    assert told(findings, "trial run").status == "warning"  # it cannot run, and says so
    assert "they do not work together as they are" in capsys.readouterr().out


TENSOR_FAULTS = {
    "nan": ("drafter weights", {"fc__weight": lambda x: x * np.nan}, "wrong", "NaN or infinite in fc.weight"),
    "zero": ("drafter weights", {"layers__1__mlp__down_proj__weight": np.zeros_like}, "wrong", "all zero in layers.1"),
    "no head": ("drafter weights", {"markov_head__markov_w2__weight": np.zeros_like}, "warning", "(never trained) in"),
    "rounded": ("embed_tokens.weight", {"embed_tokens__weight": lambda x: (x * 4096).round() / 4096}, "ok", "rounding"),
    "quantised": (
        "lm_head.weight",
        {"lm_head__weight": lambda x: x * np.float32(1.1)},
        "warning",
        "by 0.1 of its size",
    ),
    "other": ("embed_tokens.weight", {"embed_tokens__weight": lambda x: x[::-1]}, "wrong", "another target's"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_of_the_tensors(fault: str, target_folder, drafter) -> None:
    name, changes, status, message = TENSOR_FAULTS[fault]
    rewrite(drafter, **changes)
    code, findings, _ = examine(target_folder, drafter)
    found = told(findings, name)
    assert (found.status, code) == (status, int(status == "wrong")) and message in found.message


@pytest.mark.parametrize(
    ("ids", "offsets", "status", "message"),
    [
        (np.append(DRAFTS, 257), None, "ok", "121 of 300 tokens, the stop tokens among them"),
        (DRAFTS, None, "warning", "lacks the stop tokens [257]"),
        (DRAFTS, DRAFTS, "wrong", "looks like target ids in place of offsets"),
        (DRAFTS, np.zeros(7), "wrong", "d2t maps 7 tokens, draft_vocab_size is 120"),
        (DRAFTS, -np.arange(120) // 2, "wrong", "target tokens more than once"),
    ],
)
def test_the_draft_vocabulary(ids, offsets, status: str, message: str, target_folder, drafter) -> None:
    reduce_vocabulary(drafter, ids, offsets)
    code, findings, _ = examine(target_folder, drafter)
    found = [f for f in findings if f.name == "draft vocabulary"]
    assert status in [f.status for f in found] and any(message in f.message for f in found)
    assert code == int(status == "wrong")


def test_files_that_cannot_be_read_are_code_2_and_both_are_named(target_folder, drafter, tmp_path, capsys) -> None:
    file = drafter / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    code, _, report = examine(tmp_path / "nowhere", drafter)
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and len(report["errors"]) == 2
    assert "nowhere: no such file" in err and "truncated or corrupt" in err and err.count("cannot be read") == 2
    assert doctor.main([str(target_folder), str(drafter), "--max-tokens", "1"]) == 2
    assert "max_tokens 1: must be at least 2" in capsys.readouterr().err


def test_without_arguments_it_looks_at_the_embedded_pair(target_folder, golden, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(load, "embedded_target_path", lambda: str(target_folder))
    monkeypatch.setattr(load, "embedded_drafter_path", lambda: str(golden / "inference/dspark_qwen3_vanilla"))
    assert doctor.main(["--no-run", "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["target"] == str(target_folder) and report["trial"] is None


def test_a_target_without_a_tokenizer_is_told_and_does_not_run(golden, drafter) -> None:
    code, findings, report = examine(golden / "targets/qwen3_untied", drafter, "--max-tokens", "8")
    assert code == 1 and report["trial"] is None
    assert told(findings, "tokenizer").status == "wrong" and told(findings, "trial run").status == "warning"


def test_acceptance_by_position_counts_what_was_reached() -> None:
    """Rounds of 1, 4 and 2 tokens with blocks of 3; the last one had room for one draft token."""
    done = Completion("0", list(range(8)), "length", 1, 3, 9, 7, 4, 0.0)
    run = doctor_trial.Run(done, (1, 4, 2))
    assert doctor_trial.acceptance_by_position(run, 3, limit=8) == [(2, 3), (1, 1), (1, 1)]
    done.finish_reason = "stop"  # what ended with the stop token says nothing
    assert doctor_trial.acceptance_by_position(run, 3, limit=8) == [(1, 2), (1, 1), (1, 1)]


# --- causes, found by running ---


def built_target() -> SimpleNamespace:
    """Five layers on hidden states of two halves: the first holds the token and decides the next one, the second is
    empty until layer 2 writes it. (No attention, no other layer does anything.)"""
    config = TransformerConfig(
        vocab_size=TOKENS, num_layers=LAYERS, tie_embeddings=False, max_positions=128, num_tokens=TOKENS, **SIZES
    )
    params = jax.tree.map(np.array, init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(4)
    for number, layer in enumerate(params["layers"]):
        layer["o"][:] = 0
        layer["down"][:] = 0
        if number == 2:
            layer["down"][HALF:] = rng.normal(size=layer["down"][HALF:].shape) * 100
    params["embed"][:] = 0
    rows = rng.normal(size=(TOKENS, HALF))
    params["embed"][:, :HALF] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    params["head"][:] = np.roll(params["embed"], 1, axis=0)  # token t is followed by t + 1
    tokenizer = SimpleNamespace(eos_ids=(), decode=str)
    return SimpleNamespace(config=config, params=jax.tree.map(jnp.asarray, params), tokenizer=tokenizer)


def built_drafter(ids: tuple[int, ...], anchor_predicts: bool = True) -> Drafter:
    """A drafter whose first slot is exact while the context features have an empty second half (layers 0 and 1)."""
    config = DrafterConfig(
        block_size=3 if anchor_predicts else 2, num_layers=1, target_layer_ids=ids, mask_token_id=TOKENS - 1,
        vocab_size=TOKENS, draft_vocab_size=TOKENS, markov_rank=0, markov_kind="none", confidence=False,
        confidence_with_markov=False, shares_embeddings=True, num_target_layers=LAYERS, max_positions=128,
        anchor_predicts=anchor_predicts, **SIZES,
    )  # fmt: skip
    params = jax.tree.map(np.array, init_drafter(config, jax.random.key(1)))
    rng = np.random.default_rng(2)
    layer = params["layers"][0]
    layer["down"][:] = 0
    layer["o"][:] = rng.normal(size=layer["o"].shape) * 20  # what attention brings drowns the token
    layer["kv"][..., :HALF] = 0  # and it reads the second half alone
    layer["kv"][..., HALF:] = rng.normal(size=layer["kv"][..., HALF:].shape)
    params["fc"][:] = 0
    params["fc"][HALF:, HALF:] = np.eye(HALF)
    return Drafter(config, jax.tree.map(jnp.asarray, params), Path("built"))


@pytest.mark.parametrize(
    ("ids", "anchor_predicts", "cause", "message"),
    [
        ((2,), True, "layer ids off by one", "with target_layer_ids [1] the accepted length is"),
        ((1,), False, "slot convention", "with an anchor slot that predicts a token the accepted length is"),
        ((1,), True, None, ""),
    ],
)
def test_causes_are_found_by_running(ids, anchor_predicts: bool, cause: str | None, message: str) -> None:
    files: Any = SimpleNamespace(shapes={}, sizes=None)
    pair = built_target(), built_drafter(ids, anchor_predicts)
    found, numbers = doctor_trial.trial(*pair, files, [3, 5, 7], 24, suspects=cause is None)
    wrong = {finding.name: finding.message for finding in found if finding.status == "wrong"}
    assert told(found, "same text").status == "ok"
    if cause is None:
        assert not wrong and numbers["accepted_length"] > 1.8
        assert [f.name for f in found if "not the cause" in f.message] == ["layer ids off by one"] * 2 + [
            "slot convention"
        ]
    else:
        assert numbers["accepted_length"] < doctor_trial.NEAR_ONE
        assert set(wrong) == {"accepted length", cause} and message in wrong[cause]


def test_weights_that_were_never_trained_are_a_cause(target_folder, drafter, monkeypatch) -> None:
    """All norms at 1, and a text that the draft vocabulary hardly has; no other run is made then."""
    reduce_vocabulary(drafter, np.append(DRAFTS, 257))
    norms = [name for name in load_file(drafter / "model.safetensors") if name.endswith("norm.weight")]
    rewrite(drafter, **{name.replace(".", "__"): np.ones_like for name in norms})
    done = Completion("doctor", [298] * 20, "length", 3, 19, 133, 133, 0, 0.0)
    runs = []

    def generate(*arguments: Any) -> doctor_trial.Run:
        runs.append(arguments)
        return doctor_trial.Run(done, (1,) * 19)

    monkeypatch.setattr(doctor_trial, "generate", generate)
    code, findings, report = examine(target_folder, drafter, "--max-tokens", "20")
    assert code == 1 and len(runs) == 2 and report["trial"]["accepted_length"] == 1
    assert f"all {len(norms)} norm weights are exactly 1" in told(findings, "training").message
    assert "has 0% of the text's tokens" in told(findings, "vocabulary map").message
