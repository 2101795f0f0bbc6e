"""Generate text: `python serve.py --prompt TEXT`, or `--prompts FILE.jsonl --output FILE.jsonl`; and `--help`."""

from __future__ import annotations

import sys

from dspark_jax.serving.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
