"""Options of the command line: what is refused at the door, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark_jax.config import auto_dtype
from dspark_jax.serving.main import main
from dspark_jax.serving.settings import ServeSettings, parse_settings

REFUSED = [
    (["--prompt", "a", "--temperature", "-1"], "temperature -1.0: must be finite and at least 0"),
    (["--prompt", "a", "--temperature", "nan"], "temperature nan: must be"),
    (["--prompt", "a", "--top-p", "0"], "top_p 0.0: must be above 0 and at most 1"),
    (["--prompt", "a", "--top-p", "1.5"], "top_p 1.5: must be"),
    (["--prompt", "a", "--top-k", "-2"], "top_k -2: must be 0 (off) or more"),
    (["--prompt", "a", "--min-p", "1"], "min_p 1.0: must be at least 0 and below 1"),
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens 0: must be at least 1"),
    (["--prompt", "a", "--seed", "-1"], "seed -1: must be"),
    (["--prompt", "a", "--stop", ""], "must be a non-empty string"),
    (["--prompt", "a", "--threshold", "1.5"], "threshold 1.5: a probability"),
    (["--prompt", "a", "--profile", "{file}"], "--profile: only goes with --schedule causal or async, not fixed"),
    (["--prompt", "a", "--schedule", "causal", "--profile", "no.json"], "profile no.json: no such file, make one with"),
    (["--prompt", "a", "--tensor", "0"], "tensor 0: must be at least 1 device"),
    (["--prompt", "a", "--data", "2"], "batch_size 1: must be a multiple of data 2"),
    (["--prompt", "a", "--compile-cache", "{file}"], "is a file, must be a folder"),
    (["--prompt", ""], "prompt '': must not be empty"),
    ([], "exactly one of --prompt"),
    (["--prompt", "a", "--demo"], "exactly one of --prompt"),
    (["--prompt", "a", "--output", "x.jsonl"], "--output: only goes with --prompts"),
    (["--prompt", "a", "--compare"], "--compare: only goes with --prompts"),
    (["--prompt", "a", "--line-filter", "odd"], "--line-filter: only goes with --prompts"),
    (["--prompt", "a", "--batch-size", "2"], "batch_size 2: only goes with --prompts"),
    (["--prompts", "missing.jsonl", "--output", "x.jsonl"], "prompts missing.jsonl: no such file"),
    (["--prompts", "{file}"], "needs --output"),
    (["--prompts", "{file}", "--output", "{folder}/no/x.jsonl"], "/no does not exist, make it first"),
    (["--prompts", "{file}", "--output", "{folder}"], "is a folder, must be a file"),
    (["--prompts", "{file}", "--output", "{file}"], "must be different files"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--json", "{folder}/no/x.json"], "json"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--limit", "0"], "limit 0: must be at least 1"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--shard", "0/4"], "shard '0/4': must be I/N with I from 1 to N"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--shard", "5/4"], "shard '5/4': must be I/N"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--shard", "half"], "shard 'half': must be I/N"),
    (["--prompt", "a", "--shard", "1/2"], "--shard: only goes with --prompts"),
    (["--prompt", "a", "--order", "input"], "--order: only goes with --prompts"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--batch-size", "0"], "batch_size 0: must be at least 1"),
    (["--prompts", "{file}", "--output", "x.jsonl", "--compare", "--drafter", "none"], "drafter 'none'"),
    (["--demo", "--temperature", "1"], "--demo: decodes greedily"),
    (["--prompt", "a", "--ngram-tokens", "0"], "ngram_tokens 0: must be at least 1"),
    (["--prompt", "a", "--ngram-shortest", "4"], "ngram_shortest 4: must lie in 1..ngram_longest (3)"),
    (["--prompt", "a", "--drafter", "ngram", "--draft", "x"], "draft 'x': --drafter ngram loads none"),
    (["--prompt", "a", "--drafter", "ngram", "--schedule", "threshold"], "schedule 'threshold': --drafter ngram has"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_options_are_one_line_on_stderr_and_code_2(words, message, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert main([word.format(file=file, folder=tmp_path) for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("serve.py: error: ") and message in err


def test_words_become_settings():
    words = "--prompt hi --stop A --stop B --top-k 5 --seed 7 --schedule threshold --drafter none".split()
    settings = parse_settings(words)
    assert settings == ServeSettings(
        prompt="hi", stop=("A", "B"), top_k=5, seed=7, schedule="threshold", drafter="none"
    )
    assert settings.sampling()["stop"] == ("A", "B")
    assert settings.as_json()["prompt"] == "hi"


@pytest.mark.parametrize("words", ["--nothing", "--prompt a --top-k many", "--prompt a --dtype int8"])
def test_unknown_options_and_types_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(words.split())
    assert exit_info.value.code == 2
    assert capsys.readouterr().out == ""


def test_auto_dtype_follows_the_processor(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("flags\t\t: fpu avx2 avx512_bf16\n")
    assert auto_dtype(file) == auto_dtype(file, rows=15) == "float32"
    assert auto_dtype(file, rows=16) == "bfloat16"
    file.write_text("flags\t\t: fpu avx2\n")
    assert auto_dtype(file, rows=16) == "float32"
    file.write_text("flags\t\t: fpu avx2 amx_bf16 amx_tile\n")
    assert auto_dtype(file) == "bfloat16"
    assert auto_dtype(file, rows=16) == "bfloat16"
    assert auto_dtype(tmp_path / "none") == "float32"


def test_help_has_units_and_loads_no_jax():
    code = (
        "import sys\nfrom dspark_jax.serving.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: sys.exit(end.code or 3 * ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens to generate at most" in done.stdout
