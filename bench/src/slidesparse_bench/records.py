"""Benchmark records: the lines of a results file, written by ``bench`` and read by ``report``.

A file is JSON lines, one :class:`Record` a line, compressed where its name ends in ``.gz``. All records of one
*comparison* (one problem, its variants interleaved in one run) share ``started``; only those may be divided by one
another. Reading is strict: an unknown, missing or mistyped field is an error that names the file, the line and the
field, because a table must not rest on a guess.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

from slidesparse.base.readable_size import readable_size
from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import InputError, first_line, system_words
from slidesparse_bench.known_models import TYPES
from slidesparse_bench.number_range import require_numbers, require_printable

DENSE_VARIANT = "dense"
DENSE_SIX_BITS = "dense 6bit"
"""Our dense product of weights of six bits."""
CONTROL = "inf"
"""The paper's infinity control: a dense weight in slid form, two non-zeros in every window, so K doubles."""

COPY, QUANTIZE = "copy", "quantize"
PLAIN = "plain"
"""Variant ``plain 6:8``: the rows of all experts by one weight, the rate that a grouped product is held against."""
GROUPED = "grouped"
"""Benchmark of a mixture's experts."""
SQUARE = "square"
ALL = "*"
BENCHMARKS = ("gemm", GROUPED, "kernels", "linear", "pack")

FORMAT = 1
"""Version of the schema; raised when a field changes its meaning."""

LARGEST = 1 << 28
"""Most characters of a file of records, unpacked: a few kilobytes of gzip may promise any number."""

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One problem that is measured.

    Attributes:
        benchmark: ``gemm``, ``grouped``, ``kernels``, ``linear`` or ``pack``.
        model: The model that the shape comes from, ``square``, or empty for a kernel on activations alone.
        layer: ``qkv``, ``o``, ``gate_up`` or ``down``; of experts ``gate_up, balanced``; empty where there is no model.
        dtype: ``int8``, ``fp8``, ``bf16`` or ``fp16``.
        tokens: M, rows of the activations; 0 where there are none.
        out_features: N, rows of the weight; 0 where there is none.
        in_features: K, columns of the weight before lifting.
        scaled: Scales are applied and the output is rounded to bf16 (fp16 for fp16); False: a bare product, as in the
            paper's kernel tables.
    """

    benchmark: str
    model: str
    layer: str
    dtype: str
    tokens: int
    out_features: int
    in_features: int
    scaled: bool = True

    @property
    def n_operations(self) -> int:
        """Multiplications and additions of the dense product, ``2 M N K``."""
        return 2 * self.tokens * self.out_features * self.in_features

    def describe(self) -> str:
        """Return the case as one line for people."""
        words = [self.benchmark, self.dtype, "" if self.scaled else "bare", self.model, self.layer]
        sizes = {"M": self.tokens, "N": self.out_features, "K": self.in_features}
        return " ".join([word for word in words if word] + [f"{k}={size}" for k, size in sizes.items() if size])


@dataclass(frozen=True)
class Timing:
    """Times of one call, in microseconds.

    Attributes:
        median_us: Median over the samples.
        p20_us: 20th percentile.
        p80_us: 80th percentile.
        samples: How many samples; each is the mean of one pass over all operand copies.
        copies: Operand copies that a pass rotates through, so that the L2 cache is cold.
        method: ``graph`` (CUDA graph replay) or ``events`` (eager calls between events).
        host_us: Host time of an eager call, where it was measured.
    """

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    copies: int
    method: str
    host_us: float | None = None


@dataclass(frozen=True)
class Tried:
    """One algorithm of a search.

    Attributes:
        name: Its name in its library.
        median_us: Median time in microseconds; None where it has none, or only the library's own search knows it.
        why_not: Why it could not run, or None.
    """

    name: str
    median_us: float | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class Clocks:
    """SM clock in MHz, power in W and temperature in degrees C, as the GPU reports them; None where it does not."""

    sm_mhz: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class Machine:
    """The machine that made a record; versions are None where a package is not installed."""

    gpu: str
    capability: str
    driver: str | None
    memory_gb: float
    l2_mb: float
    torch: str
    cuda: str | None
    triton: str | None
    cusparselt: str | None
    vllm: str | None
    slidesparse: str
    commit: str | None


@dataclass(frozen=True)
class Record:
    """One variant of one problem.

    Attributes:
        case: The problem.
        machine: The machine that ran it.
        started: When the comparison began: UTC, ISO 8601; the same in all its records.
        clocks_before: The clocks before the comparison.
        clocks_after: The clocks when its last launch had been queued, so under load.
        variant: ``dense``, a pattern (``6:8``), ``inf`` (the paper's control: a dense weight in slid form), the name
            of a kernel (``copy``, ``quantize``, ``lift 6:8``), or ``*`` for a whole problem that was left out.
        backend: The backend whose kernel ran.
        algorithm: The name of the fastest algorithm in its library.
        tried: Every algorithm that was tried to find it.
        timing: The times; None when there are none, and ``why_not`` says why.
        why_not: A refusal, a failure, or a budget that was spent; None when there is a time.
        error: Relative error of the result, checked before timing; None without a time.
        noise: Relative difference of the medians of one variant timed twice in this comparison.
        ideal_speedup: Speed-up over dense if 2:4 were twice as fast as dense; None where it means nothing.
        n_bytes: Fewest bytes that the variant moves: inputs read once, outputs written once.
        format: Version of this schema.
    """

    case: Case
    machine: Machine
    started: str
    clocks_before: Clocks
    clocks_after: Clocks
    variant: str
    backend: str
    algorithm: str = ""
    tried: tuple[Tried, ...] = ()
    timing: Timing | None = None
    why_not: str | None = None
    error: float | None = None
    noise: float | None = None
    ideal_speedup: float | None = None
    n_bytes: int = 0
    format: int = FORMAT

    def to_line(self) -> str:
        """Return the record as a line of a results file, without the newline."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> Record:
        """Read a line of a results file: the inverse of :meth:`to_line`.

        Raises:
            InputError: When the line is not such a record, naming the field.
        """
        data = parse_json(line, "record")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(
                "format of a benchmark record",
                got=repr(got),
                needed=str(FORMAT),
                remedy="give files that slidesparse bench wrote",
            )
        record: Record = decode(cls, data, "record")
        if (record.timing is None) == (record.why_not is None):
            raise InputError("a record needs either a time or a reason for having none", got=record.why_not)
        _check(record)
        return record


def _check(record: Record) -> None:
    """Refuse names that no table has, and numbers that nobody can have measured."""
    case, timing = record.case, record.timing
    for name, names in {"benchmark": BENCHMARKS, "dtype": TYPES}.items():
        if getattr(case, name) not in names:
            raise InputError(f"record.case.{name}", got=repr(getattr(case, name)), needed=f"one of {', '.join(names)}")
    require_printable(case, "record.case")
    require_printable(record.machine, "record.machine")
    require_numbers(case, "record.case", "tokens", "out_features", "in_features")
    require_numbers(record, "record", "error", "noise", "n_bytes")
    require_numbers(record, "record", "ideal_speedup", positive=True)
    require_numbers(record.machine, "record.machine", "memory_gb", "l2_mb")
    for clocks in (record.clocks_before, record.clocks_after):
        require_numbers(clocks, "record.clocks", "sm_mhz", "power_w", "temperature_c")
    for tried in record.tried:
        require_numbers(tried, "record.tried", "median_us", positive=True)
    if timing is not None:
        require_numbers(timing, "record.timing", "median_us", "p20_us", "p80_us", "samples", "copies", positive=True)
        require_numbers(timing, "record.timing", "host_us")


def open_records(path: Path, mode: str) -> IO[str]:
    """Open a file of records as text, in mode ``r`` to read it, ``x`` to create it, or ``a`` to add to it."""
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, f"{mode}t", encoding="utf-8"))
    return path.open(mode, encoding="utf-8")


def new_records(path: Path) -> IO[str]:
    """Open a new file of records.

    Raises:
        InputError: It exists already, or cannot be written.
    """
    try:
        return open_records(path, "x")
    except FileExistsError as error:
        raise InputError(
            "the records file exists", got=path, remedy="name another; slidesparse report reads several"
        ) from error
    except OSError as error:
        raise InputError("cannot write the records", got=system_words(error)) from error


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Return all records of some files, in their order.

    Raises:
        InputError: Naming the file and line that is no record, or a file that cannot be read.
    """
    return parse_lines(paths, Record.from_line)


def parse_lines(paths: Iterable[Path], parse: Callable[[str], T]) -> list[T]:
    """Return a record for each line of some files, in their order.

    Args:
        paths: The files.
        parse: Makes a record of a line, or raises :class:`InputError`.

    Raises:
        InputError: Naming the file and the line that is no record, or the file that cannot be read.
    """
    return [record for path in paths for record in _parse_text(path, _read_text(path), parse)]


def resume_lines(path: Path, parse: Callable[[str], T]) -> list[T]:
    """Return the records of a file that is to be added to; its last line is ended, where an editor or a stop left it.

    Args:
        path: The file.
        parse: See :func:`parse_lines`, for errors too.
    """
    text = _read_text(path)
    records = _parse_text(path, text, parse)
    if text and not text.endswith("\n"):
        with open_records(path, "a") as file:
            file.write("\n")
    return records


def _read_text(path: Path) -> str:
    try:
        with open_records(path, "r") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing", needed="a file that slidesparse bench wrote") from error
    except OSError as error:
        raise InputError(f"cannot read {path}", got=error.strerror or first_line(error)) from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", got=first_line(error)) from error
    if len(text) > LARGEST:
        raise InputError(f"{path} is too large", needed=f"at most {readable_size(LARGEST)} when it is unpacked")
    return text


def _parse_text(path: Path, text: str, parse: Callable[[str], T]) -> list[T]:
    # Not splitlines(), which also splits at U+2028 and others that a JSON string may hold.
    lines = text.removesuffix("\n").split("\n") if text else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(line))
        except InputError as error:
            cut = number == len(lines) and not text.endswith("\n") and not _is_json(line)
            remedy = "its writer was stopped in the middle of it: delete that line" if cut else None
            raise error.located(f"{path}, line {number}", remedy) from error
    return records


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
