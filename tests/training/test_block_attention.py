"""Attention of draft blocks: against a dense formula, what a block may see, packed rows, meshes, kernels for TPUs."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.models.platform import compiling_for
from dspark_jax.profiling.topology import open_topology
from dspark_jax.sharding import MeshShape, make_mesh
from dspark_jax.training import block_kernel
from dspark_jax.training.block_attention import Form, Inputs, _tiles, block_attention, choose_form

SCALE = 0.3


class Sizes(NamedTuple):
    """Letters as everywhere; G KV heads of Q query heads each, hd wide."""

    N: int = 2
    A: int = 5
    T: int = 24
    K: int = 2
    G: int = 2
    Q: int = 2
    hd: int = 8


class Problem(NamedTuple):
    """The arrays that `block_attention` takes, in its order, and a cotangent of its result."""

    arrays: tuple[jax.Array, ...]
    first: jax.Array
    anchors: jax.Array
    keep: jax.Array
    cotangent: jax.Array


def draw(sizes: Sizes, seed: int = 0, documents: int = 1, dropped: float = 0.2) -> Problem:
    """Normal arrays; ascending anchors, of which those at the end are dropped; rows cut into documents."""
    n, a, t, k, g, q, hd = sizes
    rng = np.random.default_rng(seed)
    shapes = [(g, q, hd, n * a * k), (g, hd, n * a * k), (g, hd, n * a * k), (g, hd, n * t), (g, hd, n * t)]
    arrays = tuple(jnp.asarray(1.5 * rng.standard_normal(s), jnp.float32) for s in shapes)
    keep = np.arange(a) < rng.binomial(a, 1 - dropped, (n, 1))
    anchors = np.sort(rng.integers(0, t, (n, a)), axis=1) * keep
    starts = np.sort(rng.integers(0, t, (n, documents - 1)), axis=1)
    starts = np.concatenate([np.zeros((n, 1), int), starts], axis=1)  # [N, S]
    first = np.max(np.where(starts[:, None] <= anchors[..., None], starts[:, None], 0), axis=-1)
    where = (jnp.asarray(x, jnp.int32) for x in (first, anchors))
    return Problem(arrays, *where, jnp.asarray(keep), jnp.asarray(rng.standard_normal(shapes[0]), jnp.float32))


def dense(p: Problem, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """The formula, in float32, over all context and all slots of a sequence at once."""
    n, a = p.anchors.shape
    q, k, v, far_k, far_v = (x.reshape(*x.shape[:-1], n, -1) for x in arrays)
    keys, values = jnp.concatenate([far_k, k], -1), jnp.concatenate([far_v, v], -1)  # [G, hd, N, T + A * K]
    block = jnp.arange(q.shape[-1]) // (q.shape[-1] // a)
    at = jnp.arange(far_k.shape[-1])
    seen = (at >= p.first[..., None]) & (at < p.anchors[..., None]) & p.keep[..., None]  # [N, A, T]
    own = jnp.broadcast_to(block[:, None] == block, (n, block.size, block.size))
    mask = jnp.concatenate([seen[:, block], own], -1)  # [N, A * K, T + A * K]
    scores = jnp.where(mask, SCALE * jnp.einsum("gqhns,ghnt->gqnst", q, keys), -jnp.inf)
    out = jnp.einsum("gqnst,ghnt->gqhns", jax.nn.softmax(scores, axis=-1), values)
    return jnp.where(p.keep[:, block], out, 0.0).reshape(arrays[0].shape)


def cut(size: int, groups: int, tile: int, dtype: str = "float32", kernel: bool = False) -> Form:
    return Form(SCALE, jnp.dtype(dtype), size, groups, tile, kernel, kernel)


@partial(jax.jit, static_argnums=(1, 2))
def result(p: Problem, form: Form | None = None, dtype: str = "float32") -> list[jax.Array]:
    """Value of `block_attention` and its gradients."""

    def attend(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return block_attention(*arrays, p.first, p.anchors, p.keep, SCALE, jnp.dtype(dtype), form)

    out, pull = jax.vjp(attend, p.arrays)
    return [out, *pull(p.cotangent)[0]]


def check(got: list[jax.Array], exact: list[jax.Array], tolerance: float) -> None:
    for one, two in zip(got, exact, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance * max(float(jnp.abs(two).max()), 1.0))


@jax.jit
def exact(p: Problem) -> list[jax.Array]:
    out, pull = jax.vjp(lambda arrays: dense(p, arrays), p.arrays)
    return [out, *pull(p.cotangent)[0]]


SHAPES = [  # with blocks of a group, groups of a chunk, positions of a tile
    (Sizes(N=1, A=7, T=9, K=1, G=1, Q=3), (2, 2, 8)),
    (Sizes(N=3, A=19, T=40, K=3, Q=1), (4, 3, 16)),
    (Sizes(N=2, A=1, T=1, K=4), (1, 1, 8)),
]


@settings(max_examples=24)
@given(
    shape=st.sampled_from(SHAPES),
    documents=st.integers(1, 4),
    dropped=st.sampled_from([0.0, 0.2, 0.8]),
    seed=st.integers(0, 999),
)
def test_chunks_and_tiles_give_the_dense_formula(
    shape: tuple[Sizes, tuple[int, int, int]], documents: int, dropped: float, seed: int
) -> None:
    p = draw(shape[0], seed, documents, dropped)
    check(result(p, cut(*shape[1])), exact(p), 3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("bfloat16", 3e-2)])
def test_the_cut_chosen_for_this_platform_gives_the_dense_formula(dtype: str, tolerance: float) -> None:
    p = draw(Sizes(A=37, T=150, K=3), documents=2)
    check(result(p, None, dtype), exact(p), tolerance)


def test_extremes() -> None:
    """Everything dropped; blocks at the very start, which see themselves alone."""
    p = draw(Sizes(), dropped=1.0)
    assert all(not np.any(x) for x in result(p))
    p = draw(Sizes())
    p = p._replace(first=p.anchors)
    out, _, _, _, *context = result(p)
    np.testing.assert_allclose(out, exact(p)[0], atol=1e-5)
    assert not np.any(context)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_block_sees_neither_its_anchor_nor_other_documents_nor_other_blocks(kernel: bool) -> None:
    sizes = Sizes(N=1, A=6, T=300, K=2)
    p = draw(sizes, seed=12, documents=3, dropped=0.0)
    block = 3
    low, high = int(p.first[0, block]), int(p.anchors[0, block])
    assert 0 < low < high - 1
    slots = slice(block * sizes.K, (block + 1) * sizes.K)
    p = p._replace(cotangent=p.cotangent * jnp.zeros_like(p.cotangent).at[..., slots].set(1.0))
    at, slot = np.arange(sizes.T), np.arange(sizes.A * sizes.K)
    hidden = (at < low) | (at >= high)
    others = (slot < slots.start) | (slot >= slots.stop)
    noise = np.random.default_rng(1).standard_normal

    def shaken(x: jax.Array, where: np.ndarray) -> jax.Array:
        return jnp.where(where, x + jnp.asarray(30 * noise(x.shape), jnp.float32), x)

    masks = [others, others, others, hidden, hidden]
    form = cut(16, 1, 128, kernel=True) if kernel else cut(2, 2, 64)
    clean = result(p, form)
    changed = result(p._replace(arrays=tuple(map(shaken, p.arrays, masks))), form)
    np.testing.assert_array_equal(clean[0][..., slots], changed[0][..., slots])
    for one, two, mask in zip(clean[1:], changed[1:], masks, strict=True):
        np.testing.assert_array_equal(one, two)
        assert not np.any(np.asarray(one)[..., mask])
    last = result(p._replace(arrays=(*p.arrays[:3], *(shaken(x, at == high - 1) for x in p.arrays[3:]))), form)
    assert np.any(clean[0][..., slots] != last[0][..., slots])


def test_packed_rows_equal_their_documents_apart() -> None:
    sizes, starts = Sizes(N=1, A=5, T=13, K=2), (0, 13, 26)
    apart = [draw(sizes, seed, dropped=0.0) for seed in range(3)]  # of one shape, which compiles once
    row = Problem(
        tuple(jnp.concatenate(parts, axis=-1) for parts in zip(*(p.arrays for p in apart), strict=True)),
        jnp.concatenate([p.first + at for p, at in zip(apart, starts, strict=True)], axis=1),
        jnp.concatenate([p.anchors + at for p, at in zip(apart, starts, strict=True)], axis=1),
        jnp.concatenate([p.keep for p in apart], axis=1),
        jnp.concatenate([p.cotangent for p in apart], axis=-1),
    )
    each = [result(p, cut(2, 2, 8)) for p in apart]
    check(result(row, cut(2, 2, 8)), [jnp.concatenate(x, axis=-1) for x in zip(*each, strict=True)], 3e-6)


def test_tiles_that_no_block_of_a_chunk_sees_are_left_out() -> None:
    anchors = jnp.asarray([[3, 9, 20, 33, 33, 0]], jnp.int32)
    first = jnp.asarray([[0, 0, 16, 32, 32, 0]], jnp.int32)
    keep = jnp.asarray([[True] * 5 + [False]])
    inputs = Inputs(*[jnp.zeros(())] * 5, first, anchors, keep)
    np.testing.assert_array_equal(_tiles(cut(2, 1, 8), inputs)[:, 0], [[0, 2, 4], [2, 5, 5]])
    nothing = inputs._replace(keep=jnp.zeros_like(keep))
    np.testing.assert_array_equal(_tiles(cut(2, 1, 8), nothing)[:, 0], [[0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_nothing_of_anchors_times_context_exists(platform: str) -> None:
    """No array of the traced program is larger than inputs and results, or than one chunk's and tile's scores."""
    sizes = Sizes(N=2, A=512, T=2048, K=4, G=1, Q=1, hd=8)
    p = draw(sizes)
    with compiling_for(platform):
        form = choose_form(p.arrays[0].shape, sizes.T, p.anchors.shape, SCALE, jnp.float32)
        largest = max(sizes_of(jax.make_jaxpr(result.__wrapped__)(p).jaxpr))
    scores = form.size * form.groups * sizes.K * form.tile
    inputs = max(x.size for x in p.arrays) + 2 * sizes.A * sizes.N * sizes.K
    assert largest <= sizes.N * max(scores, 2 * inputs)
    assert scores * 8 <= sizes.A * sizes.K * sizes.T


def sizes_of(jaxpr: Any) -> list[int]:
    """Elements of every array that the equations of a jaxpr make, inner ones too."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval.size for v in equation.outvars]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += sizes_of(getattr(inner, "jaxpr", inner))
    return found


def places(p: Problem, mesh: jax.sharding.Mesh) -> Any:
    """Shardings of a problem: sequences along data and fsdp, KV heads along tensor."""
    rows = ("data", "fsdp")

    def place(x: jax.Array) -> NamedSharding:
        cut = PartitionSpec(rows) if x.ndim == 2 else PartitionSpec("tensor", *[None] * (x.ndim - 2), rows)
        return NamedSharding(mesh, cut)

    return jax.tree.map(place, p)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_mesh_changes_nothing(kernel: bool) -> None:
    p = draw(Sizes(N=4, A=7, T=130, K=2), documents=2)
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices()[:8])
    form = cut(16, 1, 128, kernel=True) if kernel else None
    with jax.set_mesh(mesh):
        got = result(jax.device_put(p, places(p, mesh)), form)
    check(got, exact(p), 3e-6)


@pytest.mark.parametrize(
    ("sizes", "dtype", "tolerance"),
    [
        (Sizes(A=20, T=300, K=7, Q=3), "bfloat16", 3e-2),
        (Sizes(N=1, A=40, T=520, K=3, G=1), "float32", 3e-6),
    ],
)
def test_the_kernel_gives_the_dense_formula(sizes: Sizes, dtype: str, tolerance: float) -> None:
    p = draw(sizes, documents=3)
    size, tile = block_kernel.cut(sizes.Q * sizes.K, sizes.hd, sizes.A, sizes.T)
    check(result(p, cut(size, 1, tile, dtype, kernel=True), dtype), exact(p), tolerance)


@pytest.mark.parametrize("rows", [1, 7, 28, 112, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_the_kernel_is_cut_to_what_a_chip_holds(rows: int, head_dim: int) -> None:
    size, tile = block_kernel.cut(rows, head_dim, 512, 4096)
    assert size % 8 == 0 and tile % 128 == 0 and 4096 % tile == 0
    assert size * rows * (16 * head_dim + 12 * tile) <= block_kernel._MEMORY or (size, tile) == (8, 128)
    assert block_kernel.cut(rows, head_dim, 8, 100)[1] == 128


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("kernel", [True, False])
def test_it_compiles_for_a_tpu_mesh(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        mesh = make_mesh(MeshShape(2, 2, 2), open_topology("v5e:2x4").devices)
    except ValueError as error:
        pytest.skip(str(error))
    if not kernel:
        monkeypatch.setattr(block_kernel, "FEWEST", 1 << 30)
    p = draw(Sizes(N=4, A=32, T=1024, K=7, G=2, Q=4, hd=128))
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), p, places(p, mesh))
    with compiling_for("tpu"), jax.set_mesh(mesh):
        program = jax.jit(lambda p: result.__wrapped__(p, None, "bfloat16")).lower(abstract)
    text = program.compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == (3 if kernel else 0)
    assert "all-gather" not in text and "collective-permute" not in text
