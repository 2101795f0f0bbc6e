"""The bodies of requests: OpenAI's fields, and the extensions of this server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dspark_jax.data.neutral import NEUTRAL
from dspark_jax.serving.http.fields import (
    INT32,
    INT63,
    MOST_CHOICES,
    MOST_STOP_IDS,
    Content,
    Flag,
    Number,
    Prompts,
    Stop,
    Text,
    Whole,
    neutral,
)
from dspark_jax.serving.http.settings import MOST_LOGPROBS

Count = Annotated[Whole, Field(ge=1, le=INT32)]
Logprobs = Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)]
StopId = Annotated[Whole, Field(ge=0, le=INT32)]


class Strictly(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strictly):
    """What a stream brings besides text: `include_usage` adds a last chunk with the counts of tokens."""

    include_usage: Flag | None = None
    include_obfuscation: Flag | None = Field(None, description="accepted; nothing is padded")


class Body(Strictly):
    """What both kinds of completions share.

    Null is the same as absent. Extensions: top_k, min_p, stop_token_ids (more tokens that end the answer), speculative
    (false: plain decoding) and trace (rounds and their drafts beside the text).
    """

    model: Text | None = Field(None, description="the served model, or left out")
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(None, description="1 by default; 0 is greedy")
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=INT32)] | None = Field(None, description="0 and -1 keep all tokens")
    min_p: Annotated[Number, Field(ge=0, lt=1)] | None = None
    seed: Annotated[Whole, Field(ge=0, le=INT63)] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[list[StopId], Field(max_length=MOST_STOP_IDS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    speculative: Flag | None = Field(None, description="false: plain decoding of this request")
    trace: Flag | None = Field(None, description="bring the rounds of decoding along; with one choice")
    frequency_penalty: Annotated[Any, neutral(NEUTRAL["frequency_penalty"])] = None
    presence_penalty: Annotated[Any, neutral(NEUTRAL["presence_penalty"])] = None
    repetition_penalty: Annotated[Any, neutral(NEUTRAL["repetition_penalty"])] = None
    logit_bias: Annotated[Any, neutral(NEUTRAL["logit_bias"])] = None

    @model_validator(mode="after")
    def _together(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only goes with stream true")
        if self.trace and self.choices > 1:
            raise ValueError(f"trace: must be left out with {self.choices} choices, it tells of one")
        return self

    @property
    def choices(self) -> int:
        """Answers that the body asks for."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatMessage(Strictly):
    """One turn; the neutral fields are those that an assistant's message of an answer has."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    refusal: Annotated[Any, neutral()] = None
    annotations: Annotated[Any, neutral([])] = None
    audio: Annotated[Any, neutral()] = None
    tool_calls: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral()] = None

    def as_turn(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    logprobs: Flag | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[Any, neutral([])] = None
    tool_choice: Annotated[Any, neutral("none", "auto")] = None
    parallel_tool_calls: Flag | None = Field(None, description="accepted; there are no tools")
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none")] = None
    response_format: Annotated[Any, neutral({"type": "text"})] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    audio: Annotated[Any, neutral()] = None
    prediction: Annotated[Any, neutral()] = None
    reasoning_effort: Annotated[Any, neutral("none")] = None
    verbosity: Annotated[Any, neutral("medium")] = None
    web_search_options: Annotated[Any, neutral()] = None
    store: Annotated[Any, neutral(False)] = None
    metadata: Annotated[Any, neutral({})] = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _chat_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only goes with logprobs true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens: must be left out, or equal to max_completion_tokens, its newer name")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; None: what the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Most likely tokens to tell of; None: no log-probabilities at all."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt: Prompts
    logprobs: Logprobs | None = None
    echo: Flag | None = Field(None, description="the prompt's text comes first; not with logprobs")
    best_of: Count | None = Field(None, description="must equal n")
    suffix: Annotated[Any, neutral("")] = None

    @model_validator(mode="after")
    def _completion_together(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of: not supported, must equal n ({self.n or 1}) or be left out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not supported with logprobs, leave one out")
        return self

    @property
    def choices(self) -> int:
        """Answers that the body asks for."""
        return (self.n or 1) * len(self.prompt)
