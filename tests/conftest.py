"""Settings that every test shares: eight virtual CPU devices, a compilation cache, and repeatable hypothesis runs.

They are environment variables because JAX reads them when it is first imported or used, and because a test's own
subprocesses then get them too. A variable that is already set wins: `JAX_PLATFORMS=cuda pytest` runs on the GPU.
"""

from __future__ import annotations

import gc
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".pytest_cache"

# Sharding tests need eight devices and the rest use the first one. Measured on two cores: a jitted 64x64 matmul takes
# 30 us a call instead of 21, 1024x1024 takes the same time, and so does compiling, where the tests spend theirs. That
# is far less than a subprocess with its own JAX for each sharding test.
# The programs are tiny and many: left unoptimised by LLVM, tests take a third less time (products are library calls),
# and without the emitters of fusions, which compile slowly, half of the rest. To test what these make as well:
# XLA_FLAGS="--xla_cpu_use_fusion_emitters=true" make test
FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_backend_optimization_level": 0,
    "--xla_cpu_use_fusion_emitters": "false",
}
for flag, value in FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()


def cpu_name() -> str:
    """A short name for this processor's instruction set: the cache holds machine code, which another may not run."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


DEFAULTS = {
    "JAX_PLATFORMS": "cpu",
    # A second run loads what the first one compiled. Tiny programs are cheaper to compile than to look up.
    "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax" / cpu_name()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    # Nothing is fetched from a hub, and nothing is written to the home folder.
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(CACHE / "huggingface"),
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
}
for name, default in DEFAULTS.items():
    os.environ.setdefault(name, default)

# A first example includes compilation, so time limits say nothing about a property.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def forgets_programs() -> Iterator[None]:
    """Drops compiled programs between modules once they are many.

    Each holds memory mappings, of which Linux allows a process 65,530 (vm.max_map_count); the compiler then crashes.
    """
    yield
    import jax  # not above: the environment variables come first

    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference data, `tests/golden`: tiny models, drafters and the values expected of them."""
    return ROOT / "tests" / "golden"


@pytest.fixture
def uncached() -> Iterator[None]:
    """JAX cannot read programs for other devices back from its compilation cache."""
    import jax  # not above: the environment variables come first
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting once
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
