"""Train a drafter: `python train.py --config configs/NAME.py [--field VALUE ...]`; `--help` lists the fields."""

from __future__ import annotations

import sys

from dspark_jax.training.trainer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
