"""``slidesparse tune``: measure once for each GPU its fastest algorithms, and which backend is fastest when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.cache_folder import lasting_cache_folder
from slidesparse.base.progress import progress_bar, table
from slidesparse.bench import environment, speed
from slidesparse.bench.comparison import Session
from slidesparse.bench.problems import MODELS, select
from slidesparse.errors import InputError
from slidesparse.gemm.cusparselt.table import AlgorithmRecord, table_path
from slidesparse.gemm.cusparselt.tune import tune_shapes
from slidesparse.gemm.speed import LayerSpeed, add_layers, tuned_path
from slidesparse.pattern import DENSE, Pattern
from slidesparse.quant import QUANT_NAMES, parse_dtype
from slidesparse.records import DTYPE_NAMES, LAYERS, Case, read_records

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
SEARCHED = "cusparselt"


@dataclass(frozen=True)
class TuneJob:
    """The shapes, types and backends to tune.

    Attributes:
        models: Names out of ``bench.problems.MODELS``.
        patterns: Patterns, uniform or partial.
        dtypes: Names out of ``records.DTYPE_NAMES``.
        tokens: M's, ascending.
        backends: Names; the search for algorithms is made only if cuSPARSELt is among them.
    """

    models: tuple[str, ...]
    patterns: tuple[str, ...]
    dtypes: tuple[str, ...]
    tokens: tuple[int, ...]
    backends: tuple[str, ...]

    def laps(self) -> list[list[list[Case]]]:
        """Return, for every model and type and for every M, the linears; those of one size once."""
        sizes = {
            model: {size: layer for layer, size in zip(LAYERS, MODELS[model], strict=True)} for model in self.models
        }
        return [
            [
                [Case("linear", model, layer, dtype, m, *size) for size, layer in sizes[model].items()]
                for m in self.tokens
            ]
            for model in self.models
            for dtype in self.dtypes
        ]

    def packed_shapes(self) -> list[tuple[int, int]]:
        """Return (out, K') of the 2:4 segments of all weights, each once."""
        sizes = {size for model in self.models for size in MODELS[model]}
        patterns = [Pattern.parse(text) for text in self.patterns]
        return sorted(
            {(out, p.following(p.groups(columns)) * p.slid_group) for out, columns in sizes for p in patterns}
        )


def make_job(
    models: Sequence[str] | None,
    patterns: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    tokens: Sequence[int],
    backends: Sequence[str] | None = None,
) -> TuneJob:
    """Return a job with a user's choices; None takes all models, 2:4 to 8:10, INT8 and FP8, all accelerated backends.

    Raises:
        InputError: An unknown name, a pattern without 2:4 segment, or an M below 1.
    """
    chosen = tuple(str(Pattern.parse(text)) for text in patterns or PATTERNS)
    for text in chosen:
        if Pattern.parse(text) == DENSE:
            raise InputError("a pattern to tune", got=text, needed="one that slides something")
    if not tokens or min(tokens) < 1:
        raise InputError("tokens to tune for", got=list(tokens), needed="numbers of at least 1")
    return TuneJob(
        select(models, MODELS, tuple(MODELS), "model"),
        chosen,
        select(dtypes, DTYPE_NAMES, QUANT_NAMES, "dtype"),
        tuple(sorted(set(tokens))),
        select(backends, speed.accelerated(), speed.accelerated(), "backend"),
    )


def search_algorithms(job: TuneJob) -> list[AlgorithmRecord]:
    """Search for cuSPARSELt's fastest algorithms, and store what is found; nothing where it is not to be tuned.

    Raises:
        UnsupportedError: There is no CUDA device, no library, too little memory, or no folder to keep the results in.
    """
    environment.require_cuda("tune")
    lasting_cache_folder()
    if not any(name.startswith(SEARCHED) for name in job.backends):
        return []
    shapes = job.packed_shapes()
    records: list[AlgorithmRecord] = []
    with progress_bar("algorithms", len(shapes) * len(job.tokens) * len(job.dtypes), unit="searches") as advance:
        for dtype in job.dtypes:
            records += tune_shapes(shapes, job.tokens, parse_dtype(dtype), progress=lambda _: advance(1))
    return records


def measure_layers(job: TuneJob, session: Session) -> Iterator[list[LayerSpeed]]:
    """Measure whole layers on every backend that ``auto`` may take; gives those of a model in one type at a time."""
    laps = job.laps()
    with torch.no_grad(), progress_bar("layers", sum(map(len, laps)), unit="comparisons") as advance:
        for by_tokens in laps:
            records = []
            for cases in by_tokens:
                records += speed.measure(session, cases, job.backends)
                advance(1)
            yield speed.layer_speeds(records)


def recorded_layers(paths: Sequence[Path]) -> list[LayerSpeed]:
    """Return the layer times of records that ``slidesparse bench linear`` made on this GPU.

    Raises:
        InputError: They are of another GPU or of other libraries, or hold no such times.
        UnsupportedError: There is no CUDA device, or no folder to keep the times in.
    """
    environment.require_cuda("tune")
    lasting_cache_folder()
    records = read_records(paths)
    here = torch.cuda.get_device_name()
    other_gpus = {record.machine.gpu for record in records} - {here}
    if other_gpus:
        raise InputError("records of another GPU", got=", ".join(sorted(other_gpus)), needed=here)
    now = speed.libraries()
    for machine in {record.machine for record in records}:
        then = speed.libraries_of(machine)
        other = [name for name in then if name in now and then[name] != now[name]]
        if other:  # filed under the libraries of today, their times would count for those
            raise InputError(
                "records of other libraries",
                got="; ".join(then[name] for name in other),
                needed="; ".join(now[name] for name in other),
                remedy="measure again: slidesparse bench linear",
            )
    return speed.layer_speeds(records)


def store_layers(layers: Sequence[LayerSpeed]) -> Path:
    """Put layer times into the user's table, from which ``auto`` chooses from now on."""
    gpu = torch.cuda.get_device_name()
    path = tuned_path(gpu)
    add_layers(path, gpu, speed.libraries(), layers)
    return path


def to_json(algorithms: Sequence[AlgorithmRecord], layers: Sequence[LayerSpeed]) -> dict[str, Any]:
    """All that was found."""
    return {"algorithms": [asdict(record) for record in algorithms], "layers": [asdict(layer) for layer in layers]}


def describe(algorithms: Sequence[AlgorithmRecord], layers: Sequence[LayerSpeed], path: Path | None) -> str:
    """What was found, for people."""
    rows = [
        (
            f"{r.key.out}x{r.key.columns}",
            r.rows,
            r.key.dtype,
            f"{r.default_us:.1f}",
            f"{r.time_us:.1f}",
            str(r.best) if r.best else "the default",
        )
        for r in algorithms
    ]
    found = [table(("weight, packed", "tokens", "type", "default us", "best us", "algorithm"), rows)] if rows else []
    found += [f"stored in {table_path()}"] if rows else []
    if path is not None:
        found.append(table(("layer", "type", "backend", "time over dense, by tokens"), speed.describe(layers)))
        found.append(f"stored in {path}")
    return "\n".join(found)
