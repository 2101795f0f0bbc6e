"""Files of throughput curves: nothing is lost, nothing foreign or damaged is taken."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.decoding.curve import Point, Prefill
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.ngram import NgramConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.profiling.curves import (
    CurveKey,
    MeasuredPoint,
    Profile,
    check_key,
    cores,
    cpu_model,
    default_path,
    fingerprint,
    key_of,
    load_curve,
    save_curve,
)
from dspark_jax.sharding import make_mesh
from tests.decoding.tiny import BLOCK, SIZES

KEY = CurveKey("cpu", "a processor", 2, 1, (1, 1, 1), "float32", "plain", "aaaa", "bbbb", 3, "0.10.2")
TARGET = TransformerConfig(
    vocab_size=12, num_layers=2, tie_embeddings=False, max_positions=64, num_tokens=12, **SIZES
)  # fmt: skip
DRAFTER = DrafterConfig(
    block_size=BLOCK, num_layers=1, target_layer_ids=(0,), mask_token_id=11, vocab_size=12, draft_vocab_size=12,
    markov_rank=4, markov_kind="vanilla", confidence=True, confidence_with_markov=True, shares_embeddings=True,
    num_target_layers=2, max_positions=64, **SIZES,
)  # fmt: skip
OTHERS = {
    "platform": "tpu", "device": "another", "cores": 4, "devices": 8, "mesh": (2, 1, 4), "dtype": "bfloat16",
    "mode": "greedy", "target": "cccc", "drafter": "none", "block_size": 7, "jax": "9.9", "estimated": True,
}  # fmt: skip


def measured(slots: int, context: int = 256, scale: float = 1.0) -> MeasuredPoint:
    """A made-up point of blocks of three."""
    buckets = (slots, 2 * slots, 4 * slots)
    drafted = tuple(scale * s for s in (0.0123456789, 0.02, 0.1 / 3))
    return MeasuredPoint(Point(slots, context, buckets, drafted, 0.01 * scale), (0.01, 0.02, 0.03, 0.0), 9)


PROFILE = Profile(KEY, (measured(1), measured(2, 256, 1.1), measured(2, 512)), (Prefill(32, 0.1), Prefill(64, 0.3)))


def test_a_file_gives_back_what_went_in(tmp_path: Path) -> None:
    save_curve(tmp_path / "deep/er/curve.json", PROFILE)
    assert load_curve(tmp_path / "deep/er/curve.json") == PROFILE
    assert [p.name for p in (tmp_path / "deep/er").iterdir()] == ["curve.json"]  # nothing is left beside it
    curve = load_curve(tmp_path / "deep/er/curve.json").curve
    assert curve.slot_sizes == (1, 2) and curve.costs(2, 384).plain == pytest.approx(0.0105)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "curve.json"
    save_curve(file, PROFILE)

    def fail(*names: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        save_curve(file, PROFILE.with_points([measured(4)]))
    assert load_curve(file) == PROFILE and list(tmp_path.iterdir()) == [file]


def test_points_are_added_and_replaced() -> None:
    more = PROFILE.with_points([measured(4), measured(1, 256, 2.0), measured(1, 512)], [Prefill(64, 0.5)])
    assert [p.place for p in more.points] == [(1, 256), (1, 512), (2, 256), (2, 512), (4, 256)]
    assert more.points[0] == measured(1, 256, 2.0) and more.points[2] == measured(2, 256, 1.1)
    assert more.slot_sizes == (1, 2, 4) and more.prefills == (Prefill(32, 0.1), Prefill(64, 0.5))
    assert more.key == KEY and len(PROFILE.points) == 3


def test_every_field_of_a_key_counts(tmp_path: Path) -> None:
    assert set(OTHERS) == {f.name for f in fields(CurveKey)}
    check_key(KEY, replace(KEY))
    for name, value in OTHERS.items():
        other = replace(KEY, **{name: value})
        with pytest.raises(ValueError, match="profile again") as caught:
            check_key(other, KEY, tmp_path / "curve.json")
        text = str(caught.value)
        assert text.startswith(f"{tmp_path / 'curve.json'}: {name} ")
        assert repr(value) in text and repr(getattr(KEY, name)) in text
        assert default_path(other) != default_path(KEY)
        save_curve(tmp_path / "curve.json", replace(PROFILE, key=other))
        assert load_curve(tmp_path / "curve.json").key == other


def test_the_default_place_follows_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inside = default_path(KEY)
    assert inside.parent == tmp_path / "dspark_jax/profiles" and inside == default_path(replace(KEY))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path(KEY) == tmp_path / "home/.cache/dspark_jax/profiles" / inside.name


def test_fingerprints_follow_sizes_and_not_calibration() -> None:
    assert fingerprint(TARGET) == fingerprint(replace(TARGET)) != fingerprint(replace(TARGET, num_tokens=11))
    assert fingerprint(replace(TARGET, rope=replace(TARGET.rope, theta=7.0))) != fingerprint(TARGET)
    assert fingerprint(replace(DRAFTER, confidence_temperatures=(1.0, 2.0, 0.5))) == fingerprint(DRAFTER)
    assert fingerprint(replace(DRAFTER, markov_rank=2)) != fingerprint(DRAFTER)
    assert fingerprint(None) == "none"
    assert fingerprint(NgramConfig(3)) != fingerprint(NgramConfig(3, longest=4))


def test_a_key_describes_this_machine() -> None:
    key = key_of(TARGET, DRAFTER, jnp.bfloat16, "filtered")
    assert (key.platform, key.devices, key.mesh) == ("cpu", 1, (1, 1, 1)) and key.cores == cores() > 0
    assert (key.dtype, key.mode, key.block_size, key.jax) == ("bfloat16", "filtered", BLOCK, jax.__version__)
    assert not key.estimated and key.device == cpu_model()
    assert key_of(TARGET, DRAFTER, jnp.bfloat16, "filtered", make_mesh(devices=jax.devices()[:1])) == key
    plain = key_of(TARGET, None, "float32", "greedy")
    assert (plain.drafter, plain.block_size) == ("none", 0)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs devices for a mesh")
def test_a_mesh_is_part_of_the_key() -> None:
    from dspark_jax.sharding import MeshShape

    two = jax.devices()[:2]
    keys = [key_of(TARGET, None, "float32", "plain", make_mesh(MeshShape(1, 1, 2), two))]
    keys.append(key_of(TARGET, None, "float32", "plain", make_mesh(MeshShape(2, 1, 1), two)))
    assert [key.mesh for key in keys] == [(1, 1, 2), (2, 1, 1)] and all(key.devices == 2 for key in keys)
    with pytest.raises(ValueError, match=r"mesh \(1, 1, 2\) was profiled, it is \(2, 1, 1\) here"):
        check_key(*keys)


def test_the_processor_is_named_where_linux_names_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Quick 9000 @ 5 GHz\nprocessor\t: 1\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Quick 9000 @ 5 GHz"
    assert cpu_model(tmp_path / "nothing") == "unknown"


def change(values: dict, path: str, value: object) -> None:
    """Sets the entry at a path like `points.0.slots`; None removes it."""
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    for step in way:
        values = values[step]
    if value is None:
        del values[last]
    else:
        values[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "something 1", "format 'something 1', must be"),
        ("format", None, "format None, must be"),
        ("key", None, "'key' is missing"),
        ("key.mesh", [1, 1], "key field mesh (1, 1)"),
        ("key.cores", "2", "key field cores '2': must be of type int"),
        ("key.jax", None, "jax"),
        ("key.wheels", 4, "wheels"),
        ("points", [], "must have at least one"),
        ("points", None, "'points' is missing"),
        ("points.0.slots", 2, "buckets [1, 2, 4]: must rise from 2"),
        ("points.0.slots", 1.5, "1.5: must be a whole number"),
        ("points.0.buckets.1", 1, "must rise from 1"),
        ("points.0.drafted.1", -1.0, "seconds must be positive"),
        ("points.0.drafted.1", float("nan"), "seconds must be positive"),
        ("points.0.drafted", [0.1], "1 times for 3 buckets"),
        ("points.0.plain", "soon", "could not convert"),
        ("points.0.spread", [0.1], "spread [0.1]: must be 4"),
        ("points.0.repeats", -1, "repeats -1"),
        ("points.1.context", 512, "each once"),
        ("prefills.0.seconds", 0, "must be positive"),
        ("prefills", 7, "not iterable"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, path: str, value: object, message: str) -> None:
    file = tmp_path / "curve.json"
    save_curve(file, PROFILE)
    values = json.loads(file.read_text())
    change(values, path, value)
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        load_curve(file)
    text = str(caught.value)
    assert text.startswith(f"{file}: damaged, or no curve of `dspark profile` (") and message in text
    assert text.endswith("profile again with `dspark profile`")


def test_half_a_file_and_none_at_all(tmp_path: Path) -> None:
    file = tmp_path / "curve.json"
    save_curve(file, PROFILE)
    for content in (file.read_bytes()[:200], b"", b"[1]", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"curve\.json: damaged, or no curve"):
            load_curve(file)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_curve(tmp_path / "nothing.json")
