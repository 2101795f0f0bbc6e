"""bfloat16 weights: products stay bfloat16 in the compiled program, and speculation gives plain decoding's tokens."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.decoding.batching import run_many
from dspark_jax.decoding.generate import Generator, Request
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.state import init_state
from tests.decoding.tiny import VOCAB, tiny_drafter, tiny_target

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU compiler")


def in_bfloat16(model):
    """The model with bfloat16 weights."""
    cast = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x  # noqa: E731
    model.params = jax.tree.map(cast, model.params)
    return model


def products_in_bfloat16(program: str) -> int:
    """How many products of a compiled program have two bfloat16 operands."""
    found = 0
    for body in re.findall(r"\{\n(.*?)\n\}", program, re.DOTALL):
        types = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", body))
        for left, right in re.findall(r" dot\(%([\w.\-]+), %([\w.\-]+)\)", body):
            found += types.get(left) == types.get(right) == "bf16"
    return found


@on_cpu
@pytest.mark.parametrize("speculative", [False, True])
def test_products_of_weights_stay_bfloat16(speculative: bool) -> None:
    """A transposed operand anywhere upstream makes XLA multiply in float32, weights and all, without a word."""
    generator = Generator(in_bfloat16(tiny_target()), in_bfloat16(tiny_drafter()) if speculative else None, stop_ids=())
    program = generator.program("greedy")
    state = init_state(program, 1, 64)
    program = run_many.lower(
        generator.target.params,
        generator.draft_params,
        state,
        jnp.int32(4),
        jnp.bool_(False),
        None,
        program=program,
        buckets=generator.buckets_of(1),
    ).compile()
    target_products = 4 * 2 + 1  # qkv, o, gate and up, down of two layers, and the head
    drafter_products = 2 + 5 + 2  # fc and kv of the features; q, kv, o, gate and up, down; head and W2
    expected = target_products + (drafter_products if speculative else 0)
    assert products_in_bfloat16(program.as_text()) == expected


@on_cpu
def test_speculation_gives_the_tokens_of_plain_decoding() -> None:
    target, drafter = in_bfloat16(tiny_target()), in_bfloat16(tiny_drafter())
    prompts = [tuple((7 * i + 3 * j) % VOCAB for j in range(5)) for i in range(6)]
    requests = [Request(str(i), ids, SamplingParams(max_tokens=40)) for i, ids in enumerate(prompts)]
    for schedule in ("fixed", "threshold"):
        fast = Generator(target, drafter, stop_ids=(), schedule=schedule, threshold=0.4)
        plain = {c.id: c.token_ids for c in Generator(target, stop_ids=()).generate(requests)}
        assert {c.id: c.token_ids for c in fast.generate(requests)} == plain
