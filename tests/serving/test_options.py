"""Options of `dspark serve`: each changes what is loaded, or what is said to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from dspark_jax.serving import demo
from dspark_jax.serving.main import main
from dspark_jax.serving.offline import Models, load_models
from dspark_jax.serving.settings import parse_settings

NGRAM = ["--drafter", "ngram"]
LOADED: dict[str, tuple[list[str], Callable[[Models], Any], Any]] = {  # option: words, what is looked at, the value
    "target": (["--target", "{golden}/targets/qwen3_tied"], lambda m: m.target.path.name, "qwen3_tied"),
    "draft": (["--draft", "{golden}/inference/dspark_qwen3_rnn"], lambda m: m.drafter.config.markov_kind, "rnn"),
    "drafter": (["--drafter", "none"], lambda m: m.drafter, None),
    "ngram_tokens": ([*NGRAM, "--ngram-tokens", "4"], lambda m: m.drafter.config.block_size, 4),
    "ngram_longest": ([*NGRAM, "--ngram-longest", "5"], lambda m: m.drafter.config.longest, 5),
    "ngram_shortest": ([*NGRAM, "--ngram-shortest", "1"], lambda m: m.drafter.config.shortest, 1),
    "data": (["--data", "2"], lambda m: dict(m.mesh.shape), {"data": 2, "fsdp": 1, "tensor": 1}),
    "tensor": (["--tensor", "2"], lambda m: dict(m.mesh.shape), {"data": 1, "fsdp": 1, "tensor": 2}),
    "dtype": (["--dtype", "bfloat16"], lambda m: str(m.target.params["embed"].dtype), "bfloat16"),
}


def loaded(flags: list[str], golden: Path, *words: str) -> Models:
    """The models of a server with these options."""
    given = [word.format(golden=golden) for word in words]
    if "ngram" in words:  # which has no files
        at = flags.index("--draft")
        flags = flags[:at] + flags[at + 2 :]
    return load_models(parse_settings(["--http", "127.0.0.1:0", *flags, *given]))


@pytest.mark.parametrize("name", LOADED)
def test_an_option_changes_what_is_loaded(name: str, models_flags: list[str], golden: Path, uncached: None) -> None:
    words, look, wanted = LOADED[name]
    assert look(loaded(models_flags, golden, *words)) == wanted


@pytest.fixture
def cache_settings() -> Iterator[None]:
    """Puts JAX's settings for its compilation cache back."""
    least = "jax_persistent_cache_min"
    names = ("jax_compilation_cache_dir", f"{least}_compile_time_secs", f"{least}_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compile_cache_is_where_programs_go(models_flags, golden, tmp_path: Path, cache_settings: None) -> None:
    loaded(models_flags, golden, "--compile-cache", str(tmp_path / "programs"), "--drafter", "none")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")


def test_sampling_options_change_what_is_said(models_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Filters at their narrowest leave the most likely token alone, however hot it is."""

    def said(*words: str, prompt: str = "hello") -> str:
        assert main(["--prompt", prompt, "--max-tokens", "12", *models_flags, "--drafter", "none", *words]) == 0
        return capsys.readouterr().out.rstrip("\n")

    greedy, hot = said(), ("--temperature", "2")
    assert said(prompt="another") != greedy
    short = said("--max-tokens", "3")
    assert greedy.startswith(short.rstrip("\ufffd")) and len(short) < len(greedy)
    sampled = said(*hot)
    assert sampled != greedy and said(*hot) == sampled != said(*hot, "--seed", "1")
    for narrow in (("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "0.999")):
        assert said(*hot, *narrow) == greedy, narrow


def test_the_demo_is_an_option(models_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", "--max-tokens", "4", *models_flags]) == 0
    assert capsys.readouterr().out.startswith(demo.PROBLEM)
