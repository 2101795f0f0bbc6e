"""The paper's configs against their real targets: shapes build, and what their docstrings count is what there is.

Only shapes are made (`jax.eval_shape`). Costs are estimated here once more, from the sizes, and compared.
"""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints.known_configs import KNOWN_CONFIGS
from dspark_jax.drafters.config import DrafterConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.interface import init_params
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import AttentionConfig, TransformerConfig
from dspark_jax.training.objectives import check_loss
from dspark_jax.training.settings import drafter_config
from dspark_jax.training.trainer import read_config

FOLDER = Path(__file__).resolve().parents[1] / "configs"
TARGETS = ("qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b")
PAIRS = [(kind, target) for target in TARGETS for kind in ("dspark", "dflash", "eagle3")] + [("mtp", "qwen3_4b")]
SAMPLES, LENGTH, EPOCHS = 1.3e6, 4096, 10
CHIP_HOUR = 0.4 * 459e12 * 3600  # FLOP of a v5p chip in an hour, at 40 % of its peak


HUB_IDS = {
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "gemma4_12b": "google/gemma-4-12B-it",
}
PUBLISHED = {name: (hub_id, KNOWN_CONFIGS[hub_id]) for name, hub_id in HUB_IDS.items()}
# Trainable parameters, from and to: five layers of a DSpark drafter are about an eighth of its target.
PARAMETERS = {
    ("dspark", "qwen3_4b"): (0.60e9, 0.63e9),
    ("dflash", "qwen3_4b"): (0.52e9, 0.55e9),
    ("eagle3", "qwen3_4b"): (0.14e9, 0.16e9),
    ("mtp", "qwen3_4b"): (0.11e9, 0.12e9),
    ("dspark", "qwen3_8b"): (1.11e9, 1.14e9),
    ("dflash", "qwen3_8b"): (1.03e9, 1.06e9),
    ("eagle3", "qwen3_8b"): (0.29e9, 0.31e9),
    ("dspark", "qwen3_14b"): (1.84e9, 1.88e9),
    ("dflash", "qwen3_14b"): (1.76e9, 1.80e9),
    ("eagle3", "qwen3_14b"): (0.48e9, 0.51e9),
    ("dspark", "gemma4_12b"): (1.40e9, 1.44e9),
    ("dflash", "gemma4_12b"): (1.27e9, 1.30e9),
    ("eagle3", "gemma4_12b"): (0.34e9, 0.36e9),
}


def attention_cost(sizes: Any, kind: AttentionConfig, span: int) -> float:
    """FLOP of a query's scores and mixing over `span` keys, in one layer."""
    return 4 * span * sizes.num_heads * kind.head_dim


def layer_weights(sizes: Any, kind: AttentionConfig, inputs: int = 1) -> float:
    """Weights of a layer's matrices; its attention reads `inputs` times D values."""
    kv = 1 if kind.shared_kv else 2
    attention = (
        sizes.hidden_size * kind.head_dim * (inputs * (sizes.num_heads + kv * kind.num_kv_heads) + sizes.num_heads)
    )
    return attention + 3 * sizes.hidden_size * sizes.intermediate_size


def target_cost(target: TransformerConfig) -> float:
    """FLOP of the target's forward pass, by token of a full sequence, without its head."""
    total = 0.0
    for i in range(target.num_layers):
        kind = target.attention(i)
        span = min(kind.window or LENGTH, LENGTH // 2)
        total += 2 * layer_weights(target, kind) + attention_cost(target, kind, span)
    return total


def drafter_cost(config: Any, anchors: int) -> float:
    """FLOP of the drafter's forward and backward pass (3 forward passes), by token of a full sequence.

    Heads: draft logits and their gradient towards the states, and the target's logits.
    """
    d, kind, half = config.hidden_size, config.attention, LENGTH // 2
    head = 6 * config.vocab_size * d
    if not isinstance(config, DrafterConfig):
        eagle = isinstance(config, Eagle3Config)
        layer = 6 * layer_weights(config, kind, 2 if eagle else 1) + 3 * attention_cost(config, kind, half)
        return 6 * (5 if eagle else 2) * d * d + (config.block_size if eagle else 1) * (layer + head)
    kv = d * kind.head_dim * kind.num_kv_heads * (1 if kind.shared_kv else 2)
    context = 6 * (len(config.target_layer_ids) * d * d + config.num_layers * kv)
    slot = 6 * layer_weights(config, kind) + 3 * attention_cost(config, kind, half + config.block_size)
    slot = config.num_layers * slot + head + 6 * config.vocab_size * config.markov_rank
    return context + anchors * config.block_size / LENGTH * slot


def claims(doc: str) -> dict[str, float]:
    """The numbers of a docstring: total FLOP, chip-hours, GFLOP a token of target and drafter, M parameters."""
    text = " ".join(doc.split())
    patterns = {
        "flop": r"measured: ([\d.e]+) FLOP",
        "hours": r"FLOP, ([\d,]+) chip-hours",
        "target": r"of ([\d.]+) GFLOP in the target",
        "drafter": r"and ([\d.]+) GFLOP in the drafter",
        "parameters": r"([\d,]+) M trainable",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    assert all(found.values()), [name for name, match in found.items() if match is None]
    return {name: float(match[1].replace(",", "")) for name, match in found.items() if match}


@pytest.mark.parametrize(("kind", "target"), PAIRS)
def test_a_config_builds_against_its_target(kind: str, target: str) -> None:
    """The drafter's shape and parameter count, and every number that the docstring gives for them."""
    file = FOLDER / f"{kind}_{target}.py"
    settings, doc = read_config(file), ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    name, published = PUBLISHED[target]
    sizes = TransformerConfig.from_hf(published)
    config = drafter_config(settings.drafter, sizes)
    expected = {"dspark": DrafterConfig, "dflash": DrafterConfig, "eagle3": Eagle3Config, "mtp": MTPConfig}
    assert settings.target == name and type(config) is expected[kind]
    config.check_target(sizes)
    check_loss(config, settings.loss)

    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    low, high = PARAMETERS[kind, target]
    assert low < count < high

    said = claims(doc)
    each = {"target": target_cost(sizes), "drafter": drafter_cost(config, settings.num_anchors)}
    total = sum(each.values()) * SAMPLES * LENGTH * EPOCHS
    assert said["parameters"] == pytest.approx(count / 1e6, rel=0.01)
    assert said["target"] == pytest.approx(each["target"] / 1e9, rel=0.02)
    assert said["drafter"] == pytest.approx(each["drafter"] / 1e9, rel=0.02)
    assert said["flop"] == pytest.approx(total, rel=0.03)
    assert said["hours"] == pytest.approx(total / CHIP_HOUR, rel=0.02)


@pytest.mark.parametrize(("kind", "target"), PAIRS)
def test_a_config_keeps_the_released_constants(kind: str, target: str) -> None:
    """What the paper's table gives (facts section 4), and where a config writes and what it is called."""
    file = FOLDER / f"{kind}_{target}.py"
    settings, doc = read_config(file), file.read_text(encoding="utf-8")
    drafter = settings.drafter
    ids = {"qwen3_14b": (1, 10, 19, 28, 37), "gemma4_12b": (5, 17, 29, 41, 46)}.get(target, (1, 9, 17, 25, 33))
    assert (settings.epochs, settings.batch_size, settings.max_length) == (EPOCHS, 512, LENGTH)
    assert (settings.lr, settings.warmup, settings.weight_decay, settings.max_grad_norm) == (6e-4, 0.04, 0.0, 1.0)
    assert settings.states == "online" and settings.output == f"runs/{target}/{kind}"
    assert drafter.block_size == (1 if kind == "mtp" else 7)
    assert drafter.target_layer_ids == (() if kind == "mtp" else ids)
    if kind in ("dspark", "dflash"):
        assert drafter.mask_token_id == (4 if target == "gemma4_12b" else 151669)
        assert (drafter.num_layers, settings.num_anchors, settings.loss.decay) == (5, 512, 4.0)
        assert drafter.markov_rank == (256 if kind == "dspark" else 0)
        assert drafter.confidence == (kind == "dspark")
    weights = (0.1, 0.9, 1.0) if kind == "dspark" else (1.0, 0.0, 0.0)
    assert (settings.loss.ce, settings.loss.tv, settings.loss.confidence) == weights
    assert f"Command: python train.py --config configs/{kind}_{target}.py\n" in doc and "Expected" in doc


def test_every_pair_of_the_paper_has_a_config() -> None:
    """And no config lies there untested, but the embedded drafter's, which a training run tests."""
    assert {f"{kind}_{target}" for kind, target in PAIRS} | {"dspark_smollm2_135m", "testbed_smollm2_135m"} == {
        f.stem for f in FOLDER.glob("*.py")
    }
