"""One prompt on the terminal, and the script itself."""

from __future__ import annotations

import json
import subprocess
import sys

from dspark_jax.serving import main as program
from dspark_jax.serving.main import main
from tests.conftest import ROOT


def test_a_prompt_streams_to_stdout_with_statistics_on_stderr(models_flags, tmp_path, capsys):
    report = tmp_path / "r.json"
    assert main(["--prompt", "hello", "--max-tokens", "9", "--json", str(report), *models_flags]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(report.read_text())
    assert out.endswith("\n") and len(out) > 1
    assert err.count("\n") == 1 and "1 prompt, 9 tokens" in err and "accepted length" in err
    assert summary["totals"]["completion_tokens"] == 9 and summary["comparison"] is None
    assert main(["--prompt", "hello", "--max-tokens", "9", "--drafter", "none", *models_flags]) == 0
    assert capsys.readouterr().out == out


def test_a_prompt_longer_than_the_context_names_both_lengths(models_flags, capsys):
    assert main(["--prompt", "a" * 600, *models_flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "tokens, the target's context has 512" in err and "Traceback" not in err


def test_an_interrupt_is_code_130(monkeypatch, capsys):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run", interrupted)
    assert main(["--prompt", "a"]) == 130
    assert "goes on from there" in capsys.readouterr().err


def test_the_script_is_a_door():
    words = [sys.executable, "serve.py", "--prompt", "a", "--top-p", "0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "serve.py: error: top_p 0.0: must be above 0 and at most 1\n"
