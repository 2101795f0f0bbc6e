"""Settings that all programs share."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

_MANY_ROWS = 16  # from which CPUs with AVX-512 BF16 are faster in bfloat16: twice with 64, slower with 1


def auto_dtype(cpuinfo: str | Path = "/proc/cpuinfo", *, rows: int = 1) -> str:
    """The fast dtype of the default device: bfloat16 on GPU, TPU and CPUs with AMX, else float32.

    Args:
        cpuinfo: where Linux lists the processor's flags; a file that is absent means none.
        rows: that are multiplied together; of many, CPUs with AVX-512 BF16, too, take bfloat16.
    """
    import jax  # not above: programs print their help without it

    if jax.default_backend() != "cpu":
        return "bfloat16"
    file = Path(cpuinfo)
    flags = set(file.read_text().split()) if file.is_file() else set()
    fast = {"amx_bf16", "avx512_bf16"} if rows >= _MANY_ROWS else {"amx_bf16"}
    return "bfloat16" if fast & flags else "float32"


def named_dtype(name: str, *, rows: int = 1) -> str:
    """`name`, and for auto the fast dtype of the default device; `rows`: as in `auto_dtype`."""
    return auto_dtype(rows=rows) if name == "auto" else name


def keep_programs(folder: str | Path) -> None:
    """Keeps all compiled programs in `folder`, so that the next start finds them (JAX's persistent compilation cache).

    Programs are found by their code, JAX's version and the device: a folder may serve many models and machines.
    """
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def log_to_stderr(form: str = "%(message)s") -> Iterator[None]:
    """Shows this package's log on stderr while it is open; for programs. `form`: of a line, as `logging.Formatter`.

    Libraries give the root logger a handler of their own that shows the same lines again: it is away for that time.
    """
    package, root, handler = logging.getLogger("dspark_jax"), logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    level = package.level
    others = [other for other in root.handlers if type(other) is logging.StreamHandler]
    quiet = logging.NullHandler()  # with a handler there, nobody adds one
    for other in others:
        root.removeHandler(other)
    root.addHandler(quiet)
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        root.removeHandler(quiet)
        for other in others:
            root.addHandler(other)


def settings_as_json(settings: Any) -> dict[str, Any]:
    """The fields of a settings dataclass as JSON values: paths as text, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(entry) for entry in value]
        return str(value) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in asdict(settings).items()}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object, a file that is there already is replaced.

    Raises:
        ValueError: a number that is not finite.
    """
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """`write_json` whole or not at all: a file that is there already stays until the new one is written."""
    part = path.with_name(path.name + ".part")
    write_json(part, values)
    part.replace(path)


def check_json(path: Path | None) -> None:
    """Refuses a file for results that cannot be written; None is none.

    Raises:
        FileNotFoundError: a folder, or in one that does not exist.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise FileNotFoundError(f"json {path}: must be a file in a folder that exists")


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def exit_code(program: str, run: Callable[[], int | None], stopped: str | None = None) -> int:
    """Runs a program and returns its exit code: what `run` returns (None is 0), or 2 for bad input, told in one line.

    Args:
        program: as its messages begin. run: does the work; ValueError and OSError are what bad input raises.
        stopped: what to say on ^C, with exit code 130; without, the interrupt goes on.
    """
    try:
        return run() or 0
    except (ValueError, OSError) as error:
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if stopped is None:
            raise
        print(f"{program}: {stopped}", file=sys.stderr)
        return 130
