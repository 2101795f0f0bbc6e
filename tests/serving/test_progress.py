"""What a long run says of itself where stderr is no terminal."""

from __future__ import annotations

from dspark_jax.serving.progress import Progress


def test_a_line_now_and_then(capsys) -> None:
    with Progress(4, every=0.0) as progress:
        for _ in range(3):
            progress.add(10)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert "75%" in told[-1] and "3/4" in told[-1] and "tokens/s" in told[-1]
    with Progress(4) as progress:
        progress.add(10)
    assert capsys.readouterr().err == ""
