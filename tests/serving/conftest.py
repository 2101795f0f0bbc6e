"""A tiny target with a tokenizer and chat template, its drafter, and a tokenizer of plain bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.checkpoints import tokenizer as own

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 300


def write_tokenizer(folder: Path, template: str | None) -> None:
    """Byte tokens 0..255, two chat markers (the second ends an answer), and plain words up to 300."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    raw.add_tokens([AddedToken(f" w{i}", normalized=False) for i in range(258, VOCABULARY)])
    raw.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def copy_model(source: Path, folder: Path) -> Path:
    """Copies a golden target or drafter into a folder, made if needed, and returns it."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    return folder


def write_target(golden: Path, folder: Path) -> Path:
    """The golden Qwen3 target in a folder, with a tokenizer beside it; its context has 512 tokens."""
    write_tokenizer(copy_model(golden / "targets/qwen3_untied", folder), TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def target_folder(golden, tmp_path_factory) -> Path:
    """`write_target`, for tests that change nothing in it."""
    return write_target(golden, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def models_flags(golden, target_folder) -> list[str]:
    """Options that name the tiny target and its drafter, in float32."""
    draft = golden / "inference/dspark_qwen3_vanilla"
    return ["--target", str(target_folder), "--draft", str(draft), "--dtype", "float32"]


@pytest.fixture(scope="session")
def tokenizer(target_folder) -> own.Tokenizer:
    """The tiny target's tokenizer."""
    return own.load_tokenizer(target_folder)


@pytest.fixture
def bare_tokenizer(tmp_path) -> own.Tokenizer:
    """The same tokenizer without a chat template."""
    write_tokenizer(tmp_path, None)
    return own.load_tokenizer(tmp_path)
