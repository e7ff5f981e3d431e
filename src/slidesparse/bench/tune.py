"""``slidesparse tune``: measure once for each GPU its fastest algorithms, and which backend is fastest when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.cache_folder import lasting_cache_folder
from slidesparse.base.file_lock import file_lock
from slidesparse.base.progress import progress_bar, table
from slidesparse.bench import environment, speed
from slidesparse.bench.comparison import Session
from slidesparse.bench.model_shapes import ModelShapes, shapes_of
from slidesparse.bench.problems import MODELS, select, select_patterns
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.cusparselt.table import AlgorithmRecord, table_path
from slidesparse.gemm.cusparselt.tune import tune_shapes
from slidesparse.gemm.select import installation, libraries
from slidesparse.gemm.speed import LayerSpeed, WrongForm
from slidesparse.gemm.speed_files import add_layers, lock_path, tuned_path
from slidesparse.records import DTYPE_NAMES, Case, read_records
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QUANT_NAMES, parse_dtype

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
SEARCHED = "cusparselt"

LOCK_S = 60.0
"""Seconds to wait for a process that measures while it loads a model."""


@dataclass(frozen=True)
class TuneJob:
    """The shapes, types and backends to tune.

    Attributes:
        models: The models, with the patterns and types to tune for each.
        tokens: M's, ascending.
        backends: Names; the search for algorithms is made only if cuSPARSELt is among them.
    """

    models: tuple[ModelShapes, ...]
    tokens: tuple[int, ...]
    backends: tuple[str, ...]

    def laps(self) -> list[list[list[Case]]]:
        """Return, for every model and type and for every M, the linears; those of one size once."""
        return [
            [
                [Case("linear", model.name, layer, dtype, m, out, columns) for layer, out, columns in model.sizes]
                for m in self.tokens
            ]
            for model in self.models
            for dtype in model.dtypes
        ]

    def patterns_of(self, case: Case) -> tuple[str, ...]:
        """Return the patterns to tune for a case."""
        return next(model.patterns for model in self.models if model.name == case.model)

    def packed_shapes(self) -> list[tuple[str, int, int]]:
        """Return (type, out, K') of the 2:4 segments of all weights, each once."""
        return sorted(
            {
                (dtype, out, p.following(p.groups(columns)) * p.slid_group)
                for model in self.models
                for _, out, columns in model.sizes
                for p in map(Pattern.parse, model.patterns)
                for dtype in model.dtypes
            }
        )


def make_job(
    models: Sequence[str] | None,
    patterns: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    tokens: Sequence[int],
    backends: Sequence[str] | None = None,
) -> TuneJob:
    """Return a job with a user's choices; None takes all models that have a name, and all accelerated backends.

    Without patterns or types a pruned checkpoint's own are tuned, 2:4 to 8:10, INT8 and FP8 for any other model.

    Raises:
        InputError: An unknown name, a pattern without 2:4 segment, or an M below 1.
        CheckpointError: A checkpoint that cannot be read.
    """
    chosen = select_patterns(patterns, ())
    if not tokens or min(tokens) < 1:
        raise InputError("tokens to tune for", got=list(tokens), needed="numbers of at least 1")
    types = select(dtypes, DTYPE_NAMES, (), "dtype")
    found = {shapes.name: shapes for shapes in map(shapes_of, models or MODELS)}
    return TuneJob(
        tuple(
            replace(
                shapes, patterns=chosen or shapes.patterns or PATTERNS, dtypes=types or shapes.dtypes or QUANT_NAMES
            )
            for shapes in found.values()
        ),
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
    shapes, records = job.packed_shapes(), list[AlgorithmRecord]()
    with progress_bar("algorithms", len(shapes) * len(job.tokens), unit="searches") as advance:
        for dtype, of_type in groupby(shapes, key=lambda shape: shape[0]):
            sizes = [(out, columns) for _, out, columns in of_type]
            records += tune_shapes(sizes, job.tokens, parse_dtype(dtype), progress=lambda _: advance(1))
    return records


def measure_layers(job: TuneJob, session: Session) -> Iterator[tuple[list[LayerSpeed], list[WrongForm]]]:
    """Measure whole layers on every backend that ``auto`` may take.

    Yields:
        The times of the layers of a model in one type, and the forms of them that were wrong.
    """
    laps, session = job.laps(), replace(session, patterns=job.patterns_of)
    with torch.no_grad(), progress_bar("layers", sum(map(len, laps)), unit="comparisons") as advance:
        for by_tokens in laps:
            records = []
            for cases in by_tokens:
                records += speed.measure(session, cases, job.backends)
                advance(1)
            yield speed.layer_speeds(records), speed.wrong_forms(records)


def recorded_layers(paths: Sequence[Path]) -> tuple[list[LayerSpeed], list[WrongForm], str | None]:
    """Return the layer times of records that ``slidesparse bench linear`` made on this GPU, what was wrong, the driver.

    Raises:
        InputError: They are of another GPU, of other libraries or of two drivers, or hold no such times.
        UnsupportedError: There is no CUDA device, or no folder to keep the times in.
    """
    environment.require_cuda("tune")
    lasting_cache_folder()
    records = read_records(paths)
    here = torch.cuda.get_device_name()
    other_gpus = {record.machine.gpu for record in records} - {here}
    if other_gpus:
        raise InputError("records of another GPU", got=", ".join(sorted(other_gpus)), needed=here)
    now, machines = libraries(), {record.machine for record in records}
    for machine in machines:
        then = speed.libraries_of(machine)
        other = [name for name in then if name in now and then[name] != now[name]]
        if other:  # filed under the libraries of today, their times would count for those
            raise InputError(
                "records of other libraries",
                got="; ".join(then[name] for name in other),
                needed="; ".join(now[name] for name in other),
                remedy="measure again: slidesparse bench linear",
            )
    layers, drivers = speed.layer_speeds(records), {machine.driver for machine in machines}
    if len(drivers) > 1:
        raise InputError("records of several drivers", got=sorted(map(str, drivers)), needed="those of one at a time")
    return layers, speed.wrong_forms(records), drivers.pop()


def mark_wrong(path: Path) -> list[WrongForm]:
    """Put what was wrong in records that were just made here into the user's table, and return it.

    Raises:
        UnsupportedError: The table cannot be written.
    """
    wrong = speed.wrong_forms(read_records([path]))
    if wrong:
        store_layers([], wrong)
    return wrong


def store_layers(layers: Sequence[LayerSpeed], wrong: Sequence[WrongForm] = (), driver: str | None = None) -> Path:
    """Put layer times into the user's table, from which ``auto`` chooses from now on.

    Args:
        layers: The times.
        wrong: Forms that were wrong, which ``auto`` does not take.
        driver: The driver with which they were taken; None for the one here.

    Raises:
        UnsupportedError: The table cannot be written.
    """
    here = installation()
    there = here if driver is None else replace(here, driver=driver)
    with file_lock(lock_path(there), LOCK_S) as held:
        path = add_layers(there, layers, wrong) if held else None
    if path is None:
        raise UnsupportedError(
            f"the times cannot be kept in {tuned_path(there)}",
            got="a folder that cannot be written, or a process that has measured for long",
            remedy="try again, or let XDG_CACHE_HOME name another folder",
        )
    return path


def to_json(
    algorithms: Sequence[AlgorithmRecord], layers: Sequence[LayerSpeed], wrong: Sequence[WrongForm]
) -> dict[str, Any]:
    """All that was found."""
    return {
        "algorithms": [asdict(record) for record in algorithms],
        "layers": [asdict(layer) for layer in layers],
        "wrong": [asdict(form) for form in wrong],
    }


def describe(
    algorithms: Sequence[AlgorithmRecord], layers: Sequence[LayerSpeed], wrong: Sequence[WrongForm], path: Path | None
) -> str:
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
    return "\n".join([*found, *speed.describe_wrong(wrong)])
