"""Attention in whole sequences: chunks against the dense formula, documents, windows, meshes, the kernel for TPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.models import attention
from dspark_jax.models.attention import causal_attention, splash_attention
from dspark_jax.models.platform import compiling_for
from dspark_jax.profiling.topology import open_topology
from dspark_jax.sharding import MeshShape, make_mesh

SCALE = 0.35
Rows = tuple[jax.Array, jax.Array, jax.Array]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences go through chunks too."""
    monkeypatch.setattr(attention, "_CHUNK", 16)


def draw(sequences: int, length: int, documents: int = 1, seed: int = 0) -> tuple[Rows, jax.Array | None]:
    """Queries `[2, 2, 8, B]`, keys and values `[2, 8, B]`; the document of each token, if there are several."""
    rng = np.random.default_rng(seed)
    rows = sequences * length
    parts = tuple(
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 2, 8, rows), (2, 8, rows), (2, 8, rows))
    )
    if documents == 1:
        return parts, None
    return parts, jnp.asarray(np.sort(rng.integers(0, documents, (sequences, length)), axis=1), jnp.int32)


def dense(rows: Rows, segments: jax.Array | None, sequences: int, window: int = 0, cap: float = 0.0) -> jax.Array:
    """The formula, over all pairs of tokens of a sequence at once."""
    q, k, v = (x.reshape(*x.shape[:-1], sequences, -1) for x in rows)
    at = jnp.arange(q.shape[-1])
    seen = at <= at[:, None]
    if window:
        seen &= at > at[:, None] - window
    seen = seen if segments is None else seen & (segments[:, :, None] == segments[:, None])
    scores = jnp.einsum("gqhns,ghnt->gqnst", q * SCALE, k)
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("gqnst,ghnt->gqhns", weights, v).reshape(rows[0].shape)


def chunked(rows: Rows, segments: jax.Array | None, sequences: int, window: int = 0, cap: float = 0.0) -> jax.Array:
    return causal_attention(*rows, sequences, SCALE, window, cap, segments)


def splash(rows: Rows, segments: jax.Array | None, sequences: int, window: int = 0, cap: float = 0.0) -> jax.Array:
    q, k, v = rows
    length = q.shape[-1] // sequences
    return splash_attention(q * SCALE, k, v, segments, length=length, window=window, cap=cap, interpret=True)


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def result(function: Any, rows: Rows, segments: Any, sequences: int, window: int, cap: float) -> list[jax.Array]:
    """Value and gradients under a fixed cotangent."""
    out, pull = jax.vjp(lambda rows: function(rows, segments, sequences, window, cap), rows)
    return [out, *pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))[0]]


def check(got: list[jax.Array], wanted: list[jax.Array], tolerance: float = 1e-5) -> None:
    for one, two in zip(got, wanted, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("length", "window"), [(70, 0), (16, 0), (70, 10), (70, 40), (35, 64), (100, 1)])
def test_chunks_give_the_dense_formula(length: int, window: int) -> None:
    rows, segments = draw(2, length, documents=3)
    case = (rows, segments, 2, window, 5.0)
    check(result(chunked, *case), result(dense, *case))


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=20)
@given(documents=st.integers(2, 20), seed=st.integers(0, 999))
def test_documents_do_not_see_each_other(documents: int, seed: int) -> None:
    case = (*draw(2, 50, documents, seed), 2, 0, 0.0)
    check(result(chunked, *case), result(dense, *case))


@pytest.mark.usefixtures("small_chunks")
def test_packed_rows_equal_their_documents_apart() -> None:
    lengths = (20, 37, 5)
    rows, _ = draw(1, sum(lengths))
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths)[None], jnp.int32)
    ends = np.cumsum(lengths)[:-1]
    each = zip(*(jnp.split(x, ends, axis=-1) for x in rows), strict=True)
    apart = [chunked(part, None, 1) for part in each]
    np.testing.assert_allclose(chunked(rows, segments, 1), jnp.concatenate(apart, axis=-1), atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [0, 24])
def test_a_token_sees_nothing_after_itself_and_no_other_document(window: int) -> None:
    rows, _ = draw(1, 80)
    segments = jnp.asarray(np.repeat([1, 2], (30, 50))[None], jnp.int32)
    token, noise = 60, 30 * np.random.default_rng(1).standard_normal(80)
    hidden = (np.arange(80) < 30) | (np.arange(80) > token)
    shaken = (rows[0], *(x + jnp.where(hidden, noise, 0.0) for x in rows[1:]))
    clean, changed = (chunked(x, segments, 1, window)[..., token] for x in (rows, shaken))
    np.testing.assert_array_equal(clean, changed)
    last = (rows[0], rows[1], rows[2] + jnp.where(np.arange(80) == token, 1.0, 0.0))
    assert np.any(chunked(last, segments, 1, window)[..., token] != clean)


def test_short_sequences_are_one_product() -> None:
    rows, _ = draw(2, 40)
    text = str(jax.make_jaxpr(lambda rows: chunked(rows, None, 2))(rows))
    assert text.count("dot_general") == 2 + (jax.default_backend() == "cpu") and "scan" not in text


@pytest.mark.parametrize("window", [0, 512])
def test_scores_of_all_pairs_never_exist(window: int) -> None:
    rows, segments = jax.eval_shape(lambda: draw(1, 4096, documents=3))
    traced = jax.make_jaxpr(result.__wrapped__, static_argnums=(0, 3, 4, 5))(chunked, rows, segments, 1, window, 0.0)
    sizes = sizes_of(traced.jaxpr)
    keys = window + attention._CHUNK if window else 4096
    assert max(sizes) <= max(4 * attention._CHUNK * keys, 2 * rows[0].size)


def sizes_of(jaxpr: Any) -> list[int]:
    """Elements of every array that the equations of a jaxpr make, inner ones too."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval.size for v in equation.outvars]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += sizes_of(getattr(inner, "jaxpr", inner))
    return found


def test_products_take_operands_of_the_dtype_that_is_asked_for() -> None:
    rows, _ = draw(1, 40)
    low = causal_attention(*rows, 1, SCALE, dtype=jnp.bfloat16)
    assert low.dtype == jnp.float32
    error = float(jnp.abs(low - chunked(rows, None, 1)).max())
    assert 1e-4 < error < 5e-2


@pytest.mark.parametrize(("window", "cap", "documents"), [(0, 0.0, 1), (100, 5.0, 3)])
def test_the_kernel_gives_the_dense_formula(window: int, cap: float, documents: int) -> None:
    case = (*draw(1, 300, documents), 1, window, cap)
    check(result(splash, *case), result(dense, *case))


def places(arrays: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings: sequences along data and fsdp, KV heads along tensor."""
    rows = ("data", "fsdp")

    def place(x: jax.Array) -> NamedSharding:
        cut = PartitionSpec(rows) if x.ndim == 2 else PartitionSpec("tensor", *[None] * (x.ndim - 2), rows)
        return NamedSharding(mesh, cut)

    return jax.tree.map(place, arrays)


@pytest.mark.usefixtures("small_chunks")
def test_a_mesh_changes_nothing() -> None:
    rows, segments = draw(4, 40, documents=3)
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices()[:8])
    with jax.set_mesh(mesh):
        got = result(chunked, *jax.device_put((rows, segments), places((rows, segments), mesh)), 4, 0, 0.0)
    check(got, result(dense, rows, segments, 4, 0, 0.0))


@pytest.mark.usefixtures("uncached")
def test_it_compiles_for_a_tpu_mesh() -> None:
    try:
        mesh = make_mesh(MeshShape(2, 2, 2), open_topology("v5e:2x4").devices)
    except ValueError as error:
        pytest.skip(str(error))
    arrays = jax.eval_shape(lambda: draw(4, 1000, documents=3))
    arrays = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, places(arrays, mesh))
    with compiling_for("tpu"), jax.set_mesh(mesh):
        program = jax.jit(lambda rows, segments: result.__wrapped__(chunked, rows, segments, 4, 300, 5.0)).lower(
            *arrays
        )
    text = program.compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert "all-gather" not in text and "collective-permute" not in text
