"""The program behind `serve.py` and `dspark serve`: one prompt, a file of prompts, an HTTP server, or the demo."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from dspark_jax.config import exit_code, write_json
from dspark_jax.serving.settings import ServeSettings, parse_settings

if TYPE_CHECKING:
    from dspark_jax.serving.offline import Models


def stream_prompt(settings: ServeSettings, models: Models) -> dict[str, Any]:
    """Answers `settings.prompt` on stdout, piece by piece as tokens are committed; returns the report."""
    from dspark_jax.data.prompts import prompt_record
    from dspark_jax.serving import report
    from dspark_jax.serving.demo import show_piece
    from dspark_jax.serving.offline import answers, make_generator, make_job, make_plan

    job = make_job(prompt_record({"prompt": settings.prompt}, "prompt"), models.target.tokenizer, settings)
    generator = make_generator(models, settings, every_round=True)
    plan = make_plan(generator, [job])
    began = time.perf_counter()
    records = list(answers(generator, [job], models, plan, show_piece))
    print(flush=True)
    return report.make_report(settings, models.dtype, records, time.perf_counter() - began)


def run(settings: ServeSettings) -> int:
    """Does what the settings ask; returns the exit code.

    Raises:
        ValueError, OSError: bad input, as in `offline.generate_file`.
    """
    if settings.server.http is not None:
        from dspark_jax.serving.http.server import serve

        return serve(settings)
    from dspark_jax.serving import offline, report
    from dspark_jax.serving.demo import run_demo

    code = 0
    if settings.demo:
        summary, code = run_demo(settings)
    elif settings.prompts is not None:
        summary = offline.generate_file(settings)
    else:
        summary = stream_prompt(settings, offline.load_models(settings))
    if not settings.demo:
        print(report.statistics_line(summary), file=sys.stderr)
    if settings.json is not None:
        write_json(settings.json, summary)
    return code


def main(argv: list[str] | None = None, program: str = "serve.py") -> int:
    """Entry point: exit code 0, 1 (the demonstration's outputs differ), 2 (bad input, one line on stderr), 130 (^C)."""
    words = sys.argv[1:] if argv is None else argv
    stopped = "stopped; with --output, the same command goes on from there"
    return exit_code(program, lambda: run(parse_settings(words, program)), stopped)
