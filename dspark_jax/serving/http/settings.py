"""The options of the HTTP server. Nothing here imports JAX or the server's libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated

import tyro

API_KEY_VARIABLE = "DSPARK_API_KEY"
DEFAULT_SLOTS = 8  # of an engine that serves HTTP
MOST_LOGPROBS = 20  # that OpenAI's API knows


@dataclass(frozen=True)
class HttpSettings:
    """Options that go with --http.

    Attributes:
        http: address HOST:PORT of the OpenAI-compatible server, such as 127.0.0.1:8000; port 0 takes a free one.
        model_name: name of the model in requests and answers; by default that of the target's file or folder.
        api_key: key that clients must send as `Authorization: Bearer KEY`; can be given several times. Better in the
            environment variable DSPARK_API_KEY (several separated by commas), which other users of the machine cannot
            see. Without any key everybody may ask.
        max_context: tokens of prompt and answer together at most; 0: what the target allows.
        max_logprobs: most likely tokens that a request may ask for at each position, 0 to 20.
        max_waiting: requests that may wait for a slot; the next ones are refused with status 429.
        max_body: bytes of a request's body at most.
        rounds: decoding rounds between two looks of the host: text comes in pieces of so many rounds.
        drain_seconds: seconds that running requests get to end after SIGTERM or SIGINT.
        warm_up: compile before the address opens; --no-warm-up compiles when requests need it, and they all wait then.
        warm_up_tokens: what is compiled ahead is for texts of up to so many tokens, prompt and answer; 0: for all that
            --max-context allows, so that nothing is compiled later.
    """

    http: str | None = None
    model_name: str | None = None
    api_key: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = field(default=(), repr=False)
    max_context: int = 2048
    max_logprobs: int = 5
    max_waiting: int = 64
    max_body: int = 4 << 20
    rounds: int = 2
    drain_seconds: float = 30.0
    warm_up: bool = True
    warm_up_tokens: int = 240

    def check(self) -> None:
        """Refuses what cannot run.

        Raises:
            ValueError: naming option, value and what would be right.
        """
        if self.http is None:
            for entry in fields(self):
                if getattr(self, entry.name) != entry.default:
                    raise ValueError(f"--{entry.name.replace('_', '-')}: only goes with --http HOST:PORT")
            return
        parse_address(self.http)
        if self.model_name is not None and not self.model_name.strip():
            raise ValueError(f"model_name {self.model_name!r}: must not be empty")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context {self.max_context}: must be at least 2 tokens (0: the target's own limit)")
        if not 0 <= self.max_logprobs <= MOST_LOGPROBS:
            raise ValueError(f"max_logprobs {self.max_logprobs}: must lie in 0..{MOST_LOGPROBS}")
        for name, unit in (("max_body", "byte"), ("rounds", "round")):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1 {unit}")
        if self.warm_up_tokens < 0:
            raise ValueError(f"warm_up_tokens {self.warm_up_tokens}: must be at least 0 tokens")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting {self.max_waiting}: must be at least 0 requests")
        if not 0 <= self.drain_seconds < float("inf"):
            raise ValueError(f"drain_seconds {self.drain_seconds}: must be at least 0 and finite")
        self.keys()

    def keys(self, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """The keys that clients may send; empty: none is needed.

        Raises:
            ValueError: an empty key, or one with blanks or signs that a header cannot hold.
        """
        given = environment.get(API_KEY_VARIABLE, "")
        keys = (*self.api_key, *(key.strip() for key in given.split(",") if given.strip()))
        for key in keys:
            if not key or not all(33 <= ord(sign) <= 126 for sign in key):
                raise ValueError("api_key: must be printable ASCII without blanks, and not empty")
        return keys


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host stands in brackets.

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    wrong = not colon or not bare or not (port.isascii() and port.isdigit()) or int(port) > 65535
    if wrong or (":" in bare and host != f"[{bare}]"):
        raise ValueError(f"http {text!r}: must be HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
    return bare, int(port)
