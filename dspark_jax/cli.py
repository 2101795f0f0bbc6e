"""The console script `dspark COMMAND`: one table of commands, each imported only when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# command: (module that holds main, what it does)
COMMANDS = {
    "serve": ("dspark_jax.serving.main", "generate text: one prompt, a file of prompts, or an HTTP server"),
    "train": ("dspark_jax.training.trainer", "train a drafter for a frozen target"),
    "data": ("dspark_jax.data.regenerate", "let the target answer prompts, to train a drafter on"),
    "eval": ("dspark_jax.evaluation.eval_command", "measure drafters on benchmarks: accepted length, speed, positions"),
    "calibrate": ("dspark_jax.calibration.command", "make the confidences of a drafter true: fit temperatures"),
    "simulate": ("dspark_jax.evaluation.simulate_command", "simulate a fleet from a throughput curve and real rounds"),
    "convert": ("dspark_jax.checkpoints.convert", "convert a drafter to another project's format"),
    "aot": ("dspark_jax.profiling.aot_command", "compile a config for a TPU topology, without a TPU"),
    "profile": ("dspark_jax.profiling.profile_command", "measure the throughput curve that the scheduler reads"),
    "doctor": ("dspark_jax.serving.doctor", "check that a target and a drafter belong together"),
}


def usage() -> str:
    """What `dspark --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    last = "dspark COMMAND --help lists the options, with units."
    return "\n".join(("usage: dspark COMMAND [options]", "", *lines, "", last))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `argv` (the command line by default); returns the exit code, 2 without a known command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not words or words[0] not in COMMANDS:
        wrong = f"command {words[0]!r}: unknown" if words else "no command"
        print(f"dspark: error: {wrong}, must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[words[0]]
    return int(import_module(module).main(words[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
