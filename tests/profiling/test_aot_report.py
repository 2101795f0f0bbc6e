"""What a report says: sizes that fit or not, compilers' refusals, estimates of time, the table and the JSON."""

from __future__ import annotations

import json

import pytest

from dspark_jax.profiling.aot_report import (
    GIB,
    Buffer,
    Memory,
    ProgramReport,
    Times,
    estimate_times,
    largest_lines,
    mesh_text,
    refusal,
    sizes_of_refusal,
    table,
)
from dspark_jax.profiling.hlo_cost import Collective, Cost
from dspark_jax.profiling.topology import CHIPS

MESH = {"data": 1, "fsdp": 4, "tensor": 2}


def report(temporaries: float, hbm: float | None = 16, name: str = "train") -> ProgramReport:
    memory = Memory(int(2 * GIB), int(1.5 * GIB), GIB, int(temporaries * GIB), GIB // 4, 3 * GIB)
    limit = None if hbm is None else int(hbm * GIB)
    cost = Cost(2e12, 3e9, 1e9, {"all-gather": Collective(12, 4e9, 3.5e9)})
    return ProgramReport(name, MESH, 8, limit, memory.total, Times(1, 2, 0.5, None, 0.25), memory, cost)


def test_what_a_program_needs() -> None:
    """Arguments, outputs that replace none of them, temporaries and code."""
    assert report(10).needed == int(2 * GIB) + GIB // 2 + 10 * GIB + GIB // 4
    assert report(10).fits
    assert report(13.25).fits and not report(13.26).fits
    assert report(1000, hbm=None).fits


def test_a_refusal_names_the_sizes() -> None:
    said = refusal(report(14))
    assert "train: does not fit: needs 16.75 GiB of the 16.00 GiB" in said
    for part in ("arguments 2.00", "outputs beside them 0.50", "temporaries 14.00", "code 0.25"):
        assert part in said
    given_up = ProgramReport("train", MESH, 8, 16 * GIB, 48 * GIB, Times(1, 2))
    assert not given_up.fits
    assert refusal(given_up) == "train: does not fit: needs 48.00 GiB of the 16.00 GiB that a chip has"
    unasked = ProgramReport("train", MESH, 8, 16 * GIB, 17 * GIB, Times(0, 0))
    assert "needs 17.00 GiB (arguments, and gradients in training; not compiled) of the 16.00 GiB" in refusal(unasked)


@pytest.mark.parametrize(
    ("message", "needed", "there"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (48.70G) exceeds available HBM (15.75G). HLO module: jit_f.",
            48.70 * GIB,
            15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for temporaries (8.03T) exceeds "
            "available HBM (95.73G).",
            8.03 * 1024 * GIB,
            95.73 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.00G "
            "of 15.48G hbm. Exceeded hbm capacity by 4.52G.",
            20 * GIB,
            15.48 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: out of something else", 0, None),
    ],
)
def test_sizes_of_a_compilers_refusal(message: str, needed: float, there: float | None) -> None:
    assert sizes_of_refusal(message) == (int(needed), None if there is None else int(there))


def test_times_of_a_chip() -> None:
    """By hand: the slowest of products, memory and links; cycles by the clock, and none where there are none."""
    chip = CHIPS["v5e"]
    cost = Cost(flops=197e12, nbytes=819e9 / 2, cycles=3e9, collectives={"all-reduce": Collective(1, 0, 50e9)})
    times = estimate_times(cost, chip, 1, 2)
    assert (times.trace, times.compile) == (1, 2)
    assert times.compiler == pytest.approx(2)
    assert times.links == pytest.approx(0.25)
    assert times.roofline == pytest.approx(1)
    assert estimate_times(Cost(), chip, 1, 2).compiler is None
    assert estimate_times(cost, None, 1, 2) == Times(1, 2)


def test_the_table_has_a_column_for_each_program() -> None:
    given_up = ProgramReport("decode, 64 rows", MESH, 1, 16 * GIB, 48 * GIB, Times(1, 2))
    lines = {line[:28].strip(): line[28:].split() for line in table([report(10), given_up]).splitlines()}
    assert lines["mesh data x fsdp x tensor"] == ["1x4x2", "1x4x2"]
    assert lines["arguments, GiB"] == ["2.00", "-"]
    assert lines["total, GiB"] == ["12.75", "48.00"]
    assert lines["memory of a chip, GiB"] == ["16.00", "16.00"]
    assert lines["fits"] == ["yes", "NO"]
    assert lines["matrix products, TFLOP"] == ["2.00", "0"]
    assert lines["all-gather, number / GB sent"] == ["12", "/", "3.50", "-"]
    assert lines["run: compiler's cycles, s"] == ["0.5", "-"]


def test_the_json_has_everything() -> None:
    values = json.loads(json.dumps(report(10).as_json()))
    assert values["fits"] is True
    assert values["memory"]["total"] == values["needed"]
    assert values["cost"]["collectives"]["all-gather"] == {"count": 12, "nbytes": 4e9, "sent": 3.5e9}
    assert json.loads(json.dumps(ProgramReport("x", MESH, 1, None, 0, Times(0, 0)).as_json()))["memory"] is None


def test_words() -> None:
    assert mesh_text(MESH, 8) == "--mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2 --micro-batches 8"
    one = ProgramReport("x", MESH, 1, None, 0, Times(0, 0), largest=(Buffer(GIB // 2, "f32[8]", 3, "jit(f)/dot"),))
    assert largest_lines(one) == ["    0.500 GiB     3 x f32[8]  jit(f)/dot"]
