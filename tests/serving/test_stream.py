"""Prompts to ids, and ids to growing text with stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.checkpoints.tokenizer import prompt_ids
from dspark_jax.serving.stream import TextStream, overlap


def pieces_of(stream, ids, sizes=(1,)):
    """The pieces that a stream gives for `ids`, cut into chunks of `sizes` in turn."""
    out, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        out.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*out, stream.finish()]


def test_chat_template_and_plain_text(tokenizer, bare_tokenizer):
    message = {"role": "user", "content": "hé"}
    assert tokenizer.decode(prompt_ids(tokenizer, [message]), skip_special=False) == (
        "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    )
    assert bare_tokenizer.decode(prompt_ids(bare_tokenizer, [message])) == "hé"
    with pytest.raises(ValueError, match="no chat template, must be one user message and not 2"):
        prompt_ids(bare_tokenizer, [{"role": "system", "content": "s"}, message])


def test_thinking_is_switched_off_where_the_template_knows_it():
    class Recorder:
        chat_template = "{% if enable_thinking %}"
        options: dict = {}

        def apply_chat_template(self, messages, add_generation_prompt, **options):
            self.options = options
            return [1]

    recorder = Recorder()
    prompt_ids(recorder, [{"role": "user", "content": "a"}])
    assert recorder.options == {"enable_thinking": False}
    recorder.chat_template = "{{ messages }}"
    prompt_ids(recorder, [{"role": "user", "content": "a"}])
    assert recorder.options == {}


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (50,)])
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_pieces_join_to_the_text(tokenizer, sizes, stop):
    text = "añ 🙂 tail z"
    stream = TextStream(tokenizer, stop)
    pieces = pieces_of(stream, tokenizer.encode(text), sizes)
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("sizes", [(1,), (4,), (50,)])
def test_a_stop_string_ends_text_and_ids(tokenizer, sizes):
    ids = tokenizer.encode("one END two")
    stream = TextStream(tokenizer, ("END",))
    pieces = pieces_of(stream, ids, sizes)
    assert stream.stopped
    assert "".join(pieces) == stream.text == "one "
    assert stream.token_ids == ids[:7]  # with the token that completes it, nothing behind


def test_the_earliest_of_several_stops_wins_and_beginnings_are_held_back(tokenizer):
    stream = TextStream(tokenizer, ("abX", "b"))
    assert pieces_of(stream, tokenizer.encode("aab")) == ["", "a", "a", ""]
    assert stream.text == "aa"
    stream = TextStream(tokenizer, ("###",))
    assert pieces_of(stream, tokenizer.encode("a##b##")) == ["a", "", "", "##b", "", "", "##"]


def test_the_models_stop_token_has_no_text(tokenizer):
    end = tokenizer.eos_ids[0]
    for stop in ((), ("q",)):
        stream = TextStream(tokenizer, stop, (end,))
        stream.push([*tokenizer.encode("ok"), end])
        stream.finish()
        assert (stream.text, stream.token_ids[-1], stream.stopped) == ("ok", end, False)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_that_is_complete(tokenizer, text, stops):
    stream = TextStream(tokenizer, stops)
    shown = "".join(pieces_of(stream, tokenizer.encode(text)))
    complete = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not complete:
        assert (shown, stream.stopped) == (text, False)
        return
    head = text[: complete[0]]
    assert stream.stopped
    assert shown == head[: min(head.find(stop) for stop in stops if stop in head)]


def test_overlap():
    assert [overlap(text, "aab") for text in ("", "b", "xa", "xaa", "aab", "aaa")] == [0, 0, 1, 2, 0, 2]
