"""Which tokens a drafter with a reduced vocabulary may propose: the most frequent ones of the training answers."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_jax.data.records import TrainingSample, sample_table
from dspark_jax.training.distributed import is_main
from dspark_jax.training.objectives import TrainableConfig

logger = logging.getLogger(__name__)


def find_vocabulary(
    file: Path,
    samples: Sequence[TrainingSample],
    config: TrainableConfig,
    always: Sequence[int] = (),
    among: np.ndarray | None = None,
) -> np.ndarray:
    """`draft_vocabulary`, taken from `file` where that is of the same samples and sizes, else counted and kept there.

    Counting reads all samples, which takes minutes for a million of them: too long for each restart. Where `among` are
    just as many as are wanted nothing is counted.

    Raises:
        OSError: the file cannot be written.
    """
    if among is not None and len(among) == config.draft_vocab_size:
        return (among - np.arange(len(among))).astype(np.int32)
    sizes = json.dumps([config.vocab_size, config.draft_vocab_size, sorted(always)])
    if among is not None:
        sizes += json.dumps(among.tolist())
    key = zlib.crc32(sample_table(samples).checksums.astype("<u4").tobytes(), zlib.crc32(sizes.encode()))
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as found:
            if int(found["key"]) == key:
                return found["d2t"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s: not readable (%s), the vocabulary is counted again", file, error)
    d2t = draft_vocabulary(samples, config, always, among)
    if is_main():
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.new")
        with fresh.open("wb") as out:
            np.savez(out, key=np.int64(key), d2t=d2t)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(file)
    return d2t


def draft_vocabulary(
    samples: Sequence[TrainingSample],
    config: TrainableConfig,
    always: Sequence[int] = (),
    among: np.ndarray | None = None,
) -> np.ndarray:
    """The draft head's tokens: the most frequent supervised ones and `always`, as ascending offsets.

    `among` (ids, at least Vd of them): no others, not even of `always`. Ties go to the lower id, and so do places that
    are left when there are fewer distinct tokens.

    Returns:
        d2t int32 [Vd]: target id = draft id + d2t[draft id].
    """
    counts = np.zeros(config.vocab_size, np.int64)  # [V]
    for sample in samples:
        counts += np.bincount(sample.input_ids[sample.loss_mask > 0], minlength=config.vocab_size)
    covered = counts.sum()
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    if among is not None:
        rank[np.setdiff1d(np.arange(config.vocab_size), among)] = -1
    kept = np.sort(np.argsort(-rank, kind="stable")[: config.draft_vocab_size])  # [Vd]
    share = 100 * counts[kept].sum() / max(covered, 1)
    logger.info("draft vocabulary: %d tokens, %.2f %% of the answers", len(kept), share)
    return (kept - np.arange(len(kept))).astype(np.int32)
