"""Costs from the text of compiled programs: loops in full, products in both forms, collectives, traffic to HBM."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.profiling.hlo_cost import convolution_flops, group_size, program_cost
from dspark_jax.profiling.hlo_text import Shape, parse_module, parse_shapes

# A loop of five rounds as libtpu writes it: no known trip count, a product as a convolution, arrays in VMEM (S(1)), a
# collective inside, estimates of cycles (the largest integer for none), and one tuple over several arrays.
LOOP = (Path(__file__).parent / "loop.hlo").read_text()


def test_a_loop_counts_as_often_as_it_runs() -> None:
    """From 2 to below 7: five rounds of one product, one all-reduce in groups of four, and one estimate."""
    cost = program_cost(parse_module(LOOP))
    one = cost.collectives["all-reduce"]
    nbytes = 64 * 128 * 2
    assert cost.flops == 5 * 2 * 64 * 32 * 128
    assert (one.count, one.nbytes, one.sent) == (5, 5 * nbytes, 5 * nbytes * 2 * 3 / 4)
    assert cost.cycles == 5 * 1000
    assert cost.unknown_loops == 0


def test_arrays_on_the_chip_are_no_traffic() -> None:
    """The product reads `a` from HBM and writes there, `b` lies in VMEM; the all-reduce reads HBM and writes VMEM."""
    rounds = 64 * 32 * 2 + 64 * 128 * 2 + 64 * 128 * 2
    adds = 4 + 4 + 4  # the counter: two scalars read, one written
    start = 4 + 4  # the copied start of the loop
    assert program_cost(parse_module(LOOP)).nbytes == 5 * (rounds + adds) + start


def test_a_loop_that_depends_on_data_counts_once() -> None:
    text = LOOP.replace("%bound = s32[]{:T(128)} constant(7)", "%bound = s32[]{:T(128)} negate(%j)")
    cost = program_cost(parse_module(text))
    assert cost.flops == 2 * 64 * 32 * 128
    assert cost.unknown_loops == 1


def test_a_condition_inside_a_fusion() -> None:
    fused = """%lt_fusion (f0: s32[]) -> pred[] {
  %f0 = s32[] parameter(0)
  %f1 = s32[] constant(7)
  ROOT %lt.9 = pred[] compare(%f0, %f1), direction=LT
}

%condition (wide"""
    text = LOOP.replace("%condition (wide", fused)
    text = text.replace("compare(%j, %bound), direction=LT", "fusion(%j), kind=kLoop, calls=%lt_fusion")
    assert program_cost(parse_module(text)).flops == 5 * 2 * 64 * 32 * 128


def test_a_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("HloModule nothing\n\n")


def test_shapes_of_a_type() -> None:
    """Arrays of a tuple in order, with dtype, sizes and memory; scalars, and dtypes of fewer bits than a byte."""
    text = "(f32[8,128]{1,0:T(8,128)S(1)}, /*index=1*/s32[]{:T(128)}, (pred[3]{0}, s4[10]{0:S(5)}), f8e4m3fn[2,2]{1,0})"
    shapes = parse_shapes(text)
    assert shapes == (
        Shape("f32", (8, 128), 1),
        Shape("s32", ()),
        Shape("pred", (3,)),
        Shape("s4", (10,), 5),
        Shape("f8e4m3fn", (2, 2)),
    )
    assert [shape.nbytes for shape in shapes] == [4096, 4, 3, 5, 4]


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}, dimensions={0}", 3),
        ("replica_groups=[2,4]<=[8], use_global_device_ids=true", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
        ("replica_groups={}", 16),
        ("channel_id=1", 16),
    ],
)
def test_group_sizes(attributes: str, size: int) -> None:
    """All the ways in which groups of devices are written."""
    assert group_size(attributes, 16) == size


def collectives(text: str) -> dict[str, tuple[float, float, float]]:
    program = f"HloModule m, num_partitions=4\n\nENTRY %e (a: f32[8,4]) -> f32[8,4] {{\n{text}\n}}\n"
    cost = program_cost(parse_module(program))
    return {kind: (one.count, one.nbytes, one.sent) for kind, one in cost.collectives.items()}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[32,4] all-gather(%a), replica_groups=[1,4]<=[4]", {"all-gather": (1, 512, 384)}),
        (
            "(f32[8,4], f32[32,4]) all-gather-start(%a), replica_groups=[1,4]<=[4]",
            {"all-gather": (1, 512, 384)},
        ),
        ("f32[2,4] reduce-scatter(%a), replica_groups=[1,4]<=[4]", {"reduce-scatter": (1, 128, 96)}),
        ("f32[8,4] all-to-all(%a), replica_groups=[2,2]<=[4]", {"all-to-all": (1, 128, 64)}),
        (
            "(f32[8,4], f32[8,4]) collective-permute-start(%a), source_target_pairs={{0,1}}",
            {"collective-permute": (1, 128, 128)},
        ),
        ("f32[8,4] all-reduce-done(%a)", {}),
        ("f32[8,4] add(%a, %a)", {}),
    ],
)
def test_collectives_and_what_a_ring_sends(line: str, expected: dict[str, tuple[float, float, float]]) -> None:
    """Four devices: bytes of the whole array, and (g - 1) / g of it sent; the end of a pair counts nothing."""
    assert collectives(f"  %a = f32[8,4]{{1,0}} parameter(0)\n  ROOT %b = {line}") == expected


def test_a_sliced_input_counts_its_slice() -> None:
    """Of a stacked array that a fusion takes one layer of, one layer is read; in-place updates write the update."""
    text = """HloModule m

%fused (s: f32[100,8], i: s32[], u: f32[1,8]) -> f32[100,8] {
  %s = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,8]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %part = f32[1,8]{1,0} dynamic-slice(%s, %i, %zero), dynamic_slice_sizes={1,8}
  %sum = f32[1,8]{1,0} add(%part, %u)
  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%s, %sum, %i, %zero)
}

ENTRY %e (s: f32[100,8], i: s32[], u: f32[1,8]) -> f32[100,8] {
  %s = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,8]{1,0} parameter(2)
  ROOT %f = f32[100,8]{1,0} fusion(%s, %i, %u), kind=kLoop, calls=%fused
}
"""
    assert program_cost(parse_module(text)).nbytes == 32 + 4 + 32 + 32


def test_flops_of_convolutions() -> None:
    """A plain product, one with a batch axis (dilated, as libtpu writes it), and a real one over a padded window."""
    product = convolution_flops(
        Shape("bf16", (64, 32)), Shape("bf16", (32, 128)), Shape("bf16", (64, 128)), "dim_labels=bf_io->bf"
    )
    assert product == 2 * 64 * 32 * 128
    batch = "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf"
    shapes = Shape("bf16", (6, 16, 32)), Shape("bf16", (6, 32, 8)), Shape("bf16", (6, 16, 8))
    assert convolution_flops(*shapes, batch) == 2 * 6 * 16 * 32 * 8
    padded = "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    shapes = Shape("f32", (1, 10, 4)), Shape("f32", (3, 4, 5)), Shape("f32", (1, 10, 5))
    assert convolution_flops(*shapes, padded) == 2 * (3 * 10 - 2) * 4 * 5


def test_kernels_count_what_they_claim() -> None:
    """FLOPs of a Pallas kernel are those of its cost estimate; one without is counted as silent."""
    kernel = '%k{n} = f32[8,4] custom-call(%a), custom_call_target="tpu_custom_call", backend_config={{{claim}}}'
    claim = '"custom_call_config":{"cost_estimate":{"bytes_accessed":"7","flops":"240518168576"}}'
    lines = ["%a = f32[8,4]{1,0} parameter(0)", kernel.format(n=1, claim=claim), "ROOT " + kernel.format(n=2, claim="")]
    body = "\n".join(f"  {line}" for line in lines)
    cost = program_cost(parse_module(f"HloModule m\n\nENTRY %e (a: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n"))
    assert (cost.flops, cost.silent_kernels) == (240518168576, 1)


def test_a_compiled_program_of_this_host() -> None:
    """Products in a scan over a mesh of eight: FLOPs and all-reduces of all rounds, as the maths says."""
    mesh = Mesh(jax.devices()[:8], ("data",))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "data")))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def rounds(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            whole = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec()))
            return jax.lax.with_sharding_constraint(whole, x_sharding), None

        return jax.lax.scan(body, x, None, length=7)[0]

    x_sharding = x.sharding
    text = jax.jit(rounds).lower(x, w).compile().as_text()
    module = parse_module(text)
    cost = program_cost(module)
    assert module.devices == 8
    assert cost.flops == 7 * 2 * 16 * 64 * 64 / 8
    assert sum(one.count for one in cost.collectives.values()) >= 7
