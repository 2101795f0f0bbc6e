"""Whether two checkpoints belong together, read off their files: one finding per field, and none stops the others.

Where the loader refuses a drafter, at its first fault, its config is read as plain JSON and its tensors by name, so
that all faults show. The target must load: everything is held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.deepspec import CONFIG_FILE
from dspark_jax.checkpoints.drafters import describe, format_of
from dspark_jax.checkpoints.hf import resolve
from dspark_jax.checkpoints.load import Drafter, Target, load_drafter
from dspark_jax.checkpoints.recurrent import CLASSES, class_name
from dspark_jax.checkpoints.store import TensorStore, read_json
from dspark_jax.checkpoints.tokenizer import Tokenizer
from dspark_jax.config import one_line
from dspark_jax.drafters.config import DrafterConfig, check_target_layer_ids
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.models.config import TransformerConfig
from dspark_jax.models.families import FAMILIES
from dspark_jax.models.transformer import head_weight

OK, WARNING, WRONG = "ok", "warning", "wrong"
_KINDS: dict[type, str] = {DrafterConfig: "dspark", Eagle3Config: "eagle3", MTPConfig: "mtp"}
_NESTED = ("dflash_config", "transformer_layer_config")  # where other projects keep some of the fields
_HEADS = ("markov_head.", "confidence_head.")  # start at zero, and the drafter works without them
_ROUNDED, _QUANTISED = 0.005, 0.3  # relative RMS differences: of bfloat16 at most, and of 4-bit weights at most
_ROWS = 8192  # rows of a table that are compared at once


@dataclass(frozen=True)
class Finding:
    """One check: `status` is ok, warning or wrong; `drafter` and `target` are the values, None where there is none."""

    name: str
    status: str
    message: str
    drafter: Any = None
    target: Any = None

    def line(self) -> str:
        """For the terminal."""
        return f"{self.status:<8} {self.name}: {self.message}"


@dataclass(frozen=True)
class DrafterFiles:
    """A drafter as its files say, right or wrong.

    Attributes:
        raw: `config.json`. store: its tensors. loaded: what decoding gets, or None, and `refusal` says why.
        sizes: the loaded config, or else the raw one read as a model's, or None where that fails too.
    """

    folder: Path
    raw: Mapping[str, Any]
    store: TensorStore
    loaded: Drafter | None
    refusal: str
    sizes: Any

    @property
    def kind(self) -> str | None:
        """dspark (DFlash too), eagle3 or mtp; None where neither the loader nor the class name tells."""
        if self.loaded is not None:
            return _KINDS[type(self.loaded.config)]
        name = class_name(self.raw)
        if name in CLASSES:
            return _KINDS[CLASSES[name][0]]
        return "dspark" if name is not None and name.endswith("DSparkModel") else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by name."""
        return self.store.shapes()

    def get(self, name: str) -> Any:
        """A field as the loader understands it, or else as the config says, wherever it lies; None without."""
        if self.loaded is not None and hasattr(self.loaded.config, name):
            value = getattr(self.loaded.config, name)
            return list(value) if isinstance(value, tuple) else value
        places = [self.raw, *(self.raw.get(key) for key in _NESTED)]
        return next((p[name] for p in places if isinstance(p, Mapping) and p.get(name) is not None), None)

    def number(self, name: str) -> int | None:
        """A whole number among the fields; None where there is none."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def tensor(self, name: str) -> str | None:
        """What the file calls a tensor, with or without a prefix; None where it has none."""
        found = [stored for stored in self.shapes if stored == name or stored.endswith(f".{name}")]
        return found[0] if len(found) == 1 else None


class Prompted(NamedTuple):
    """The target's tokenizer and the trial prompt's tokens; without a tokenizer the reason, and no tokens."""

    tokenizer: Tokenizer | None
    ids: tuple[int, ...]
    reason: str = ""


def read_files(path: str | Path, target: Target | None = None) -> DrafterFiles:
    """Opens a drafter's folder (or hub id), and loads it in the target's dtype as far as that goes.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or is no readable JSON or safetensors.
    """
    folder = resolve(path)
    raw, store = read_json(folder / CONFIG_FILE), TensorStore(folder)
    loaded, refusal = None, ""
    sizes: Any = None
    if target is not None:
        try:
            loaded = load_drafter(folder, dtype=target.params["embed"].dtype, target=target.config)
            sizes = loaded.config
        except (ValueError, TypeError, OSError) as error:
            refusal = one_line(error)
    if sizes is None:
        for fields in (raw, raw.get("transformer_layer_config")):
            with suppress(ValueError, TypeError):
                sizes = sizes or TransformerConfig.from_hf(fields or {})
    return DrafterFiles(folder, raw, store, loaded, refusal, sizes)


def static_findings(files: DrafterFiles, target: Target, prompted: Prompted) -> list[Finding]:
    """All checks of the files, in the order in which they are told."""
    findings = [_format(files), *_sizes(files, target.config), *_layers(files, target.config), _block(files)]
    findings += [*_mask(files, target.config, prompted), *_rope(files, target.config), _dtype(files, target)]
    findings += [*_vocabulary_map(files, target.config, prompted), *_tables(files, target)]
    findings += [_values("drafter", _drafter_tensors(files), files), _values("target", _leaves(target), None)]
    return [*findings, _loads(files, target.config)]


def same(name: str, mine: Any, theirs: Any, right: str, status: str = WRONG) -> Finding:
    """A finding that is ok where both values are equal; `right` says what would be right."""
    if mine == theirs:
        return Finding(name, OK, f"{mine} in both", mine, theirs)
    told = "missing" if mine is None else mine
    return Finding(name, status, f"{told} in the drafter, {theirs} in the target; {right}", mine, theirs)


def _format(files: DrafterFiles) -> Finding:
    name, classes = "format", files.raw.get("architectures")
    if files.loaded is not None:
        return Finding(name, OK, describe(files.loaded.config, format_of(files.raw)), classes)
    if files.kind is not None:
        slots = "the anchor slot predicts the first draft token" if files.kind == "dspark" else "no slots"
        return Finding(name, OK, f"{class_name(files.raw)}, {slots}", classes)
    right = "right would be a format that `dspark convert` knows"
    return Finding(
        name, WRONG, f"architectures {classes!r}: nobody knows whether its anchor predicts; {right}", classes
    )


def _sizes(files: DrafterFiles, target: TransformerConfig) -> Iterator[Finding]:
    for name, theirs in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        yield same(name, files.get(name), theirs, f"right would be {theirs}, or the target that has {files.get(name)}")
    layers = target.num_layers
    yield same("num_target_layers", files.get("num_target_layers"), layers, f"right would be {layers}")
    if files.sizes is not None:
        right = "the head's logits would be bent differently; right would be the target's"
        yield same("final_logit_softcapping", files.sizes.final_softcap, target.final_softcap, right)


def _layers(files: DrafterFiles, target: TransformerConfig) -> Iterator[Finding]:
    ids = files.get("target_layer_ids")
    name, range_ = "target_layer_ids", f"ids of 0..{target.num_layers - 2} (-1: the embedding), strictly increasing"
    if files.kind == "mtp":
        status = WRONG if ids else OK
        yield Finding(name, status, f"{ids or 'none'}; MTP reads the target's final state, right would be none", ids)
        return
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole:
        yield Finding(name, WRONG, f"{'missing' if ids is None else repr(ids)}; right would be {range_}", ids)
        return
    try:
        check_target_layer_ids(ids, target.num_layers)
        first = 0 if files.kind == "eagle3" else -1
        if ids[0] < first:
            raise ValueError(f"target_layer_ids {ids}: Eagle3 reads layers, not the embedding")
        yield Finding(name, OK, f"{ids} of a target with {target.num_layers} layers", ids, target.num_layers)
    except ValueError as error:
        message = str(error).removeprefix("target_layer_ids ")
        yield Finding(name, WRONG, f"{message}; right would be {range_}", ids, target.num_layers)
    fc, hidden = files.tensor("fc.weight"), files.number("hidden_size")
    width = files.shapes[fc][-1] if fc else 0
    if fc and hidden and width != len(ids) * hidden:
        right = f"right would be {width / hidden:g} ids"
        yield Finding(
            "fc.weight", WRONG, f"reads {width} values, {len(ids)} layers of {hidden} have {len(ids) * hidden}; {right}"
        )


def _loads(files: DrafterFiles, target: TransformerConfig) -> Finding:
    if files.loaded is None:
        return Finding("loads", WRONG, files.refusal)
    try:
        files.loaded.config.check_target(target)
    except ValueError as error:
        return Finding("loads", WRONG, str(error))
    return Finding("loads", OK, "as decoding does it, for this target")


def _block(files: DrafterFiles) -> Finding:
    name = "ttt_length" if files.kind == "eagle3" and files.loaded is None else "block_size"
    value = files.number(name)
    if value is None or value < 1:
        return Finding(
            name, WRONG, f"{files.get(name)!r}; right would be the number of draft tokens of a round, from 1 on", value
        )
    return Finding(name, OK, f"{value} draft tokens of a round", value)


def _mask(files: DrafterFiles, target: TransformerConfig, prompted: Prompted) -> Iterator[Finding]:
    if files.kind not in ("dspark", None):
        return
    name, mask, vocab = "mask_token_id", files.number("mask_token_id"), target.vocab_size
    right = "right would be a token that no prompt and no answer contains"

    def finding(status: str, message: str) -> Finding:
        return Finding(name, status, message, mask, vocab)

    if mask is None or not 0 <= mask < vocab:
        yield finding(WRONG, f"{files.get(name)!r}, must lie in 0..{vocab - 1}; {right}")
    elif prompted.tokenizer is None:
        yield finding(WARNING, f"{mask} of {vocab}; not looked for in prompts: {prompted.reason}")
    elif mask in prompted.tokenizer.eos_ids:
        yield finding(WRONG, f"{mask} ends an answer; {right}")
    elif mask in prompted.ids:
        yield finding(WRONG, f"{mask} ({prompted.tokenizer.decode([mask], False)!r}) occurs in the prompt; {right}")
    elif mask >= prompted.tokenizer.vocab_size:
        yield finding(
            OK, f"{mask}, above the tokenizer's {prompted.tokenizer.vocab_size} tokens, inside the {vocab} rows"
        )
    elif prompted.tokenizer.decode([mask]):
        yield finding(WARNING, f"{mask} is plain text, {prompted.tokenizer.decode([mask])!r}; {right}")
    else:
        yield finding(
            OK, f"{mask} ({prompted.tokenizer.decode([mask], False)}), a special token that prompts do not have"
        )


def _rope(files: DrafterFiles, target: TransformerConfig) -> Iterator[Finding]:
    """RoPE and context against the target's full-attention layers: a drafter may differ, but seldom on purpose."""
    sizes = files.sizes
    if sizes is None:
        return
    right = "a drafter may have its own, but most take the target's"
    yield same("family", sizes.family, target.family, right, WARNING)
    yield same("rope theta", sizes.rope.theta, target.rope.theta, right, WARNING)
    mine, theirs = ({**vars(c.rope), "theta": None} for c in (sizes, target))
    if mine == theirs:
        yield Finding("rope scaling", OK, f"{sizes.rope.kind} in both", sizes.rope.kind, target.rope.kind)
    else:
        told = [f"{c.rope.kind}, factor {c.rope.factor:g}" for c in (sizes, target)]
        message = f"{told[0]} in the drafter, {told[1]} in the target; {right}"
        yield Finding("rope scaling", WARNING, message, told[0], told[1])
    yield same("head_dim", sizes.head_dim, target.head_dim, right, WARNING)
    if sizes.max_positions < target.max_positions:
        message = (
            f"{sizes.max_positions} in the drafter, {target.max_positions} in the target; beyond, nothing is drafted"
        )
        yield Finding("max_position_embeddings", WARNING, message, sizes.max_positions, target.max_positions)


def _dtype(files: DrafterFiles, target: Target) -> Finding:
    said = files.raw.get("dtype") or files.raw.get("torch_dtype")
    stored = Counter(str(array.dtype) for name, array in _drafter_tensors(files) if name not in ("d2t", "t2d"))
    dtypes = sorted(stored)
    run = str(target.params["embed"].dtype)
    strange = [d for d in dtypes if d not in ("float32", "bfloat16", "float16")]
    if strange:
        return Finding("dtype", WRONG, f"weights of type {strange}; right would be float32 or bfloat16", dtypes, run)
    if len(dtypes) > 1 or (said is not None and dtypes != [said]):
        return Finding(
            "dtype", WARNING, f"weights of type {dtypes}, config.json says {said}; both run as {run}", dtypes, run
        )
    return Finding("dtype", OK, f"{', '.join(dtypes)} stored, both run as {run}", dtypes, run)


def _vocabulary_map(files: DrafterFiles, target: TransformerConfig, prompted: Prompted) -> Iterator[Finding]:
    name, vocab = "draft vocabulary", target.vocab_size
    drafts = files.get("draft_vocab_size") or files.number("vocab_size")
    stored = files.tensor("d2t")
    if stored is None:
        if drafts == files.get("vocab_size"):
            yield Finding(name, OK, "the whole vocabulary", drafts, vocab)
        else:
            right = "right would be the tensor d2t, offsets from draft to target ids"
            yield Finding(name, WRONG, f"{drafts} of {vocab} tokens, but no map; {right}", drafts, vocab)
        return
    offsets = files.store.read(stored).astype(np.int64)
    ids = offsets + np.arange(len(offsets))  # [Vd]
    if not len(ids):
        yield Finding(name, WRONG, f"d2t is empty, draft_vocab_size is {drafts}", 0, drafts)
        return
    as_ids = len(np.unique(offsets)) == len(offsets) and 0 <= offsets.min() and offsets.max() < vocab
    hint = "; it looks like target ids in place of offsets (target id - draft id)" if as_ids else ""
    if len(offsets) != drafts:
        yield Finding(
            name, WRONG, f"d2t maps {len(offsets)} tokens, draft_vocab_size is {drafts}", len(offsets), drafts
        )
    if ids.min() < 0 or ids.max() >= vocab:
        yield Finding(
            name, WRONG, f"d2t leads to {ids.min()}..{ids.max()}, must lie in 0..{vocab - 1}{hint}", None, vocab
        )
    if len(np.unique(ids)) < len(ids):
        doubled = len(ids) - len(np.unique(ids))
        yield Finding(name, WRONG, f"d2t names {doubled} target tokens more than once{hint}", doubled)
    missing = sorted(set(prompted.tokenizer.eos_ids) - set(ids.tolist())) if prompted.tokenizer else []
    if missing:
        message = f"lacks the stop tokens {missing}: the last token of an answer is never drafted"
        yield Finding(name, WARNING, message, len(ids), vocab)
    if not missing and ids.min() >= 0 and ids.max() < vocab and len(np.unique(ids)) == len(ids) == drafts:
        stops = "the stop tokens among them" if prompted.tokenizer else "stop tokens unknown"
        yield Finding(name, OK, f"{len(ids)} of {vocab} tokens, {stops}", len(ids), vocab)


def _tables(files: DrafterFiles, target: Target) -> Iterator[Finding]:
    """Embedding and head: absent (the target's are used), or the target's own values."""
    ids: np.ndarray | None = None
    d2t = files.tensor("d2t")
    if d2t is not None:
        ids = files.store.read(d2t).astype(np.int64) + np.arange(files.shapes[d2t][0])
    tables = (
        ("embed_tokens.weight", target.params["embed"], None),
        ("lm_head.weight", head_weight(target.params), ids),
    )
    for name, theirs, rows in tables:
        stored = files.tensor(name)
        if stored is None:
            yield Finding(name, OK, "absent, the target's is used")
            continue
        wanted = (theirs.shape[0] if rows is None else len(rows), theirs.shape[1])
        if files.shapes[stored] != wanted:
            message = f"shape {list(files.shapes[stored])}, the target's has {list(wanted)}"
            yield Finding(name, WRONG, message, files.shapes[stored], wanted)
        elif rows is not None and not (0 <= rows.min() and rows.max() < theirs.shape[0]):
            yield Finding(name, WARNING, "not compared, the draft vocabulary's map is wrong")
        else:
            yield _compared(files, name, relative_difference(files.store.read(stored), theirs, rows))


def _compared(files: DrafterFiles, name: str, difference: float) -> Finding:
    told = f"differs from the target's by {difference:.2g} of its size"
    if difference <= _ROUNDED:
        return Finding(name, OK, "equal to the target's" + (", up to rounding" if difference else ""), difference)
    if difference <= _QUANTISED:
        return Finding(name, WARNING, f"{told}, as after quantisation; right would be the target's own", difference)
    status = WARNING if files.kind in ("eagle3", "mtp") else WRONG  # those may train their own
    return Finding(name, status, f"{told}: another target's, or trained; right would be the target's own", difference)


def relative_difference(mine: np.ndarray, theirs: jax.Array, rows: np.ndarray | None = None) -> float:
    """RMS of `mine - theirs` over the RMS of `theirs`, tables `[V, D]`; `rows` picks rows of `theirs`."""
    apart = size = 0.0
    for start in range(0, len(mine), _ROWS):
        part = slice(start, start + _ROWS)
        other = theirs[part] if rows is None else theirs[rows[part]]
        one, two = np.asarray(mine[part], np.float32), np.asarray(other, np.float32)
        apart += float(np.sum(np.square(one - two), dtype=np.float64))
        size += float(np.sum(np.square(two), dtype=np.float64))
    return (apart / size) ** 0.5 if size else float("inf")


def _drafter_tensors(files: DrafterFiles) -> Iterator[tuple[str, Any]]:
    return ((name, files.store.read(name)) for name in sorted(files.shapes))


def _leaves(target: Target) -> Iterator[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(target.params)[0]
    return ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)


def _values(whose: str, tensors: Iterator[tuple[str, Any]], files: DrafterFiles | None) -> Finding:
    """NaN, infinite and all-zero weights. Biases may be zero, and norms of families that add 1 to them."""
    broken: list[str] = []
    zero: list[str] = []
    idle: list[str] = []
    name, count = f"{whose} weights", 0
    family = FAMILIES[files.sizes.family] if files is not None and files.sizes is not None else None
    for tensor, value in tensors:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            continue
        count += 1
        if not bool(jnp.isfinite(value).all()):
            broken.append(tensor)
        elif value.ndim > 1 and not bool((value != 0).any()):
            (idle if tensor.startswith(_HEADS) else zero).append(tensor)
        elif family and not family.norm_offset and tensor.endswith("norm.weight") and not bool((value != 0).any()):
            zero.append(tensor)
    told = [f"{what} in {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
            for what, names in (("NaN or infinite", broken), ("all zero", zero), ("all zero (never trained)", idle))
            if names]  # fmt: skip
    if not told:
        return Finding(name, OK, f"{count} tensors, all finite, none all zero")
    return Finding(name, WRONG if broken or zero else WARNING, "; ".join(told), [*broken, *zero, *idle])
