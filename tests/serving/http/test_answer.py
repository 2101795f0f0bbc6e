"""An answer as it grows: stop strings, stop tokens, characters over several tokens, rounds in detail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.decoding.batching import Event
from dspark_jax.decoding.requests import Completion
from dspark_jax.decoding.trace import RoundTrace
from dspark_jax.serving.http.answer import AnswerText, Piece, Tally

EOS = 257


def trace(tokens, drafts=(), accepted=0):
    """A round with made-up scores: the log-probability of a token is minus its id."""
    scores = tuple(-float(t) for t in tokens)
    top = tuple(((t, -float(t)), (0, -1000.0)) for t in tokens)
    return RoundTrace(tuple(tokens), tuple(drafts), (0.5,) * len(drafts), len(drafts), accepted, scores, top)


def event(*rounds, end=None):
    """What a look brings: rounds, and the end."""
    tokens = [t for one in rounds for t in one.tokens]
    done = Completion("x", tokens, end, 1, 0, 0, 0, 0, 0.1) if end else None
    return Event(1, tokens, done, tuple(rounds))


def run(answer, looks):
    """All pieces of an answer."""
    return [answer.push(look) for look in looks]


def looks_of(ids, sizes, per_look, end="length"):
    """Token ids in rounds of `sizes` in turn, `per_look` rounds a look."""
    rounds, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        rounds.append(trace(ids[at : at + size], accepted=max(size - 1, 0)))
        at, turn = at + size, turn + 1
    looks = [event(*rounds[i : i + per_look]) for i in range(0, len(rounds), per_look)]
    return [*looks[:-1], event(*looks[-1].rounds, end=end)] if looks else [event(end=end)]


@pytest.mark.parametrize("detailed", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (50,)])
def test_text_of_several_bytes_comes_whole(tokenizer, detailed, sizes):
    text = "añ 🙂 tail €"
    answer = AnswerText(tokenizer, detailed=detailed)
    pieces = run(answer, looks_of(tokenizer.encode(text), sizes, 1))
    assert "".join(piece.text for piece in pieces) == answer.text == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.end for piece in pieces if piece.end] == ["length"] and answer.finish_reason == "length"
    assert answer.token_count == len(tokenizer.encode(text))
    if detailed:
        assert "".join(token.text for piece in pieces for token in piece.tokens) == text


@pytest.mark.parametrize("detailed", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (3,), (4, 1), (50,)])
def test_a_stop_string_over_rounds_ends_text_tokens_and_counts(tokenizer, detailed, sizes):
    ids = tokenizer.encode("abc STOP def")
    answer = AnswerText(tokenizer, ("never", "STOP"), detailed=detailed)
    pieces = run(answer, looks_of(ids, sizes, 1))
    assert "".join(piece.text for piece in pieces) == answer.text == "abc "
    assert answer.finish_reason == "stop" and answer.token_count == 8
    assert [piece.end for piece in pieces if piece.end] == ["stop"]
    if detailed:
        assert [token.id for one in answer.rounds for token in one.tokens] == tokenizer.encode("abc ")


def test_a_stop_string_that_begins_inside_a_token(tokenizer):
    """Token " w258" is one; the stop string begins in its middle."""
    ids = [*tokenizer.encode("a"), 258, *tokenizer.encode("zz")]
    answer = AnswerText(tokenizer, ("58z",), detailed=True)
    pieces = run(answer, looks_of(ids, (1,), 1))
    assert answer.text == "".join(piece.text for piece in pieces) == "a w2"
    tokens = [token for one in answer.rounds for token in one.tokens]
    assert [(token.id, token.text, token.start) for token in tokens] == [(ids[0], "a", 0), (258, " w2", 1)]
    assert answer.token_count == 3


def test_what_may_begin_a_stop_string_is_held_back_and_given_at_the_end(tokenizer):
    answer = AnswerText(tokenizer, ("xyz",), detailed=True)
    looks = [event(trace(tokenizer.encode("ab x"))), event(trace(tokenizer.encode("y")), end="length")]
    first, second = run(answer, looks)
    assert (first.text, first.rounds) == ("", ())
    assert second.text == "ab xy" and len(second.rounds) == 2


def test_stop_tokens_end_the_answer_and_are_no_text(tokenizer):
    ids = tokenizer.encode("abcd")
    for detailed in (False, True):
        answer = AnswerText(tokenizer, stop_ids=[EOS], more_stop_ids=[ids[2]], detailed=detailed)
        pieces = run(answer, looks_of(ids, (4,), 1))
        assert (answer.text, answer.finish_reason, answer.token_count) == ("ab", "stop", 3)
        assert pieces[0].end == "stop"
        answer = AnswerText(tokenizer, stop_ids=[EOS], detailed=detailed)
        run(answer, looks_of([*ids[:2], EOS], (1,), 2, end="stop"))
        assert (answer.text, answer.finish_reason, answer.token_count) == ("ab", "stop", 3)


def test_log_probabilities_and_origins_belong_to_their_tokens(tokenizer):
    ids = tokenizer.encode("abcdef")
    answer = AnswerText(tokenizer, stop_ids=[EOS], detailed=True)
    looks = [
        event(trace(ids[:1])),
        event(trace(ids[1:4], drafts=[*ids[1:3], 9], accepted=2), trace(ids[4:6], drafts=ids[4:5], accepted=1)),
        event(trace([EOS]), end="stop"),
    ]
    run(answer, looks)
    tokens = [token for one in answer.rounds for token in one.tokens]
    assert [token.logprob for token in tokens] == [-float(i) for i in ids]
    assert [token.top[0][0] for token in tokens] == ids
    assert [token.origin for token in tokens] == ["plain", "draft", "draft", "corrected", "draft", "bonus"]
    tally = Tally.of(answer.rounds)
    assert (tally.rounds, tally.drafted, tally.verified, tally.accepted) == (3, 4, 4, 3)
    assert tally.verify_budget == pytest.approx(7 / 3)


def test_accepted_drafts_behind_a_stop_string_do_not_count(tokenizer):
    ids = tokenizer.encode("abcdef")
    answer = AnswerText(tokenizer, ("cd",), detailed=True)
    run(answer, [event(trace(ids[:1])), event(trace(ids[1:], drafts=ids[1:5], accepted=4), end="length")])
    assert Tally.of(answer.rounds).accepted == 3  # b, c and d; d completes the stop string
    assert [token.text for token in answer.rounds[-1].tokens] == ["b"]


def test_a_character_that_never_ends_is_told_at_the_end(tokenizer):
    part = tokenizer.encode("🙂")[:2]
    for detailed in (False, True):
        answer = AnswerText(tokenizer, stop_ids=[EOS], detailed=detailed)
        pieces = run(answer, [event(trace([*tokenizer.encode("a"), *part])), event(trace([EOS]), end="stop")])
        assert "".join(piece.text for piece in pieces) == answer.text == "a\ufffd"
    assert "".join(token.text for one in answer.rounds for token in one.tokens) == "a\ufffd"


def test_nothing_comes_after_the_end(tokenizer):
    answer = AnswerText(tokenizer, ("b",))
    run(answer, [event(trace(tokenizer.encode("abc")))])
    assert answer.push(event(trace(tokenizer.encode("def")))) == Piece()
    assert answer.push(event(end="cancelled")) == Piece()
    assert answer.finish_reason == "stop"


@given(
    ids=st.lists(st.one_of(st.integers(0, 299), st.sampled_from([97, 98])), max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    per_look=st.integers(1, 3),
    stop=st.lists(st.text("ab w\u00e9", min_size=1, max_size=3), max_size=2),
)
def test_every_way_of_telling_gives_the_same_text(tokenizer, ids, sizes, per_look, stop):
    ids = [i for i in ids if i != EOS]
    looks = looks_of(ids, sizes, per_look)
    texts = []
    for detailed, grouping in ((False, looks), (True, looks), (False, looks_of(ids, (1000,), 1))):
        answer = AnswerText(tokenizer, stop, [EOS], detailed=detailed)
        pieces = run(answer, grouping)
        assert "".join(piece.text for piece in pieces) == answer.text
        texts.append((answer.text, answer.finish_reason, answer.token_count))
        if detailed:
            assert "".join(token.text for one in answer.rounds for token in one.tokens) == answer.text
            starts = [token.start for one in answer.rounds for token in one.tokens]
            assert starts == sorted(starts)
            assert [t.text for t in (t for r in answer.rounds for t in r.tokens)] == [
                answer.text[t.start : t.start + len(t.text)] for r in answer.rounds for t in r.tokens
            ]
    assert texts[0] == texts[1] == texts[2]
    text = tokenizer.decode(ids)
    assert text.startswith(texts[0][0]) and not any(one in texts[0][0] for one in stop)
    assert (texts[0][1] == "stop") == any(one in text for one in stop)
