"""How far a long run is: a bar in a terminal, else a line now and then; tokens per second, and the time left."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_EVERY = 30.0  # seconds between two lines


class Progress:
    """Counts prompts and their tokens, on stderr.

    Args:
        total: prompts to answer. every: seconds between two lines where stderr is no terminal.
    """

    def __init__(self, total: int, every: float = _EVERY) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="prompt", disable=not self._terminal)
        self._total, self._every = total, every
        self._prompts = self._tokens = 0
        self._began = self._told = time.perf_counter()

    def add(self, tokens: int) -> None:
        """One prompt more is answered, with so many tokens."""
        self._prompts += 1
        self._tokens += tokens
        now = time.perf_counter()
        speed = f"{self._tokens / max(now - self._began, 1e-9):.1f} tokens/s"
        if self._terminal:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update()
        elif now - self._told >= self._every:
            self._told = now
            print(
                tqdm.format_meter(self._prompts, self._total, now - self._began, unit="prompt", postfix=speed, ncols=0),
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
