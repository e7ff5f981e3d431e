"""``slidesparse tune``: measure the fastest algorithms and backends of a GPU, once.

A layer is measured as at load time (:mod:`slidesparse.tuning.measure`), with more time for each form and a random
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.cache_folder import lasting_cache_folder
from slidesparse.base.device import require_cuda
from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar, table
from slidesparse.errors import UnsupportedError
from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.cards import ask_for_times
from slidesparse.gemm.cusparselt.table import AlgorithmRecord, table_path
from slidesparse.gemm.cusparselt.tune import tune_shapes
from slidesparse.gemm.select import installation, wrong_form
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed, WrongForm
from slidesparse.gemm.speed_files import add_layers, tuned_path
from slidesparse.offline.tune_job import Kind, TuneJob
from slidesparse.pruning import prune_mask
from slidesparse.tuning.at_load import usable_times
from slidesparse.tuning.checking import WRONG
from slidesparse.tuning.measure import THOROUGH, LayerMeasurement, gaussian
from slidesparse.tuning.timing import CudaStopwatch, Stopwatch
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import DTYPES, QUANTISED, parse_dtype, rounded_bits

SEARCHED = "cusparselt"


def search_algorithms(job: TuneJob) -> list[AlgorithmRecord]:
    """Search for cuSPARSELt's fastest algorithms and store them; none where it is not to be tuned.

    Raises:
        UnsupportedError: There is no CUDA device, no library, too little memory, or no folder for the results.
    """
    require_cuda("slidesparse tune")
    lasting_cache_folder()
    if not any(name.startswith(SEARCHED) for name in job.backends):
        return []
    shapes, records = job.packed_shapes(), list[AlgorithmRecord]()
    with progress_bar("algorithms", len(shapes) * len(job.tokens), unit="searches") as advance:
        for dtype, of_type in groupby(shapes, key=lambda shape: shape[0]):
            sizes = [(out, columns) for _, out, columns in of_type]
            records += tune_shapes(sizes, job.tokens, parse_dtype(dtype), progress=lambda _: advance(1))
    return records


def measure_layers(
    job: TuneJob, device: torch.device | None = None, stopwatch: Stopwatch | None = None
) -> Iterator[tuple[list[LayerSpeed], list[WrongForm]]]:
    """Measure whole layers on every backend that ``auto`` may take.

    Yields:
        The times of a kind of layer, if they are plausible, and its forms with wrong results.
    """
    kinds = job.kinds()
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
    stopwatch = CudaStopwatch() if stopwatch is None else stopwatch
    with torch.no_grad(), progress_bar("layers", len(kinds), unit="layers") as advance:
        for kind in kinds:
            yield _measure(kind, job.backends_of(kind), job.tokens, device, stopwatch)
            advance(1)


def _measure(
    kind: Kind, backends: Sequence[str], tokens: Sequence[int], device: torch.device, stopwatch: Stopwatch
) -> tuple[list[LayerSpeed], list[WrongForm]]:
    dtype = parse_dtype(kind.dtype)
    bits = rounded_bits(kind.rounding, dtype)
    problem = Problem(Pattern.parse(kind.pattern), dtype, kind.out, kind.columns, device, bits=bits)
    able = [name for name in backends if get_backend(name).why_not(problem) is None]
    if not able:
        return [], []
    source = DTYPES["bf16"] if dtype in QUANTISED else dtype
    measurement = LayerMeasurement(_packed(kind, source, device), [DENSE_FORM, *able], source, stopwatch, THOROUGH)
    times = measurement.measure(tokens, (), lambda: False)
    layer = usable_times(times, str(kind), LOG)
    return [] if layer is None else [layer], [wrong_form(problem, name) for name in sorted(times.wrong)]


def _packed(kind: Kind, source: torch.dtype, device: torch.device) -> PackedWeight:
    """Return a random weight of a kind: of deviation ``K**-0.5``, pruned by magnitude."""
    pattern = Pattern.parse(kind.pattern)
    weight = gaussian(kind.out, kind.columns, dtype=source, device=device, seed=1) * kind.columns**-0.5
    weight = torch.where(prune_mask(weight, pattern), weight, 0)
    return pack_weight(weight, pattern, parse_dtype(kind.dtype), kind.rounding)


def store_layers(layers: Sequence[LayerSpeed], wrong: Sequence[WrongForm]) -> Path:
    """Add layer times to the user's table, by which ``auto`` chooses, or raise an UnsupportedError."""
    here = installation()
    if (path := add_layers(here, layers, wrong)) is None:
        raise UnsupportedError(
            f"the times cannot be kept in {tuned_path(here)}",
            got="a folder that cannot be written",
            remedy="let XDG_CACHE_HOME name another folder",
        )
    return path


@dataclass
class Tuned:
    """The results of tuning, and the file with the layers; None where no layer was measured."""

    algorithms: Sequence[AlgorithmRecord] = ()
    layers: Sequence[LayerSpeed] = ()
    wrong: Sequence[WrongForm] = ()
    path: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all results."""
        return {
            "algorithms": [_search_json(record) for record in self.algorithms],
            "layers": [asdict(layer) for layer in self.layers],
            "wrong": [asdict(form) for form in self.wrong],
        }

    def describe(self) -> str:
        """Return all results as text."""
        rows = [
            (
                f"{r.out}x{r.columns}",
                r.rows,
                r.dtype,
                f"{r.default_us:.1f}",
                f"{r.time_us:.1f}",
                str(r.algorithm) if r.algorithm else "the default",
            )
            for r in self.algorithms
        ]
        columns = ("weight, packed", "tokens", "type", "default us", "best us", "algorithm")
        lines = [table(columns, rows), f"stored in {table_path()}"] if rows else []
        if self.path is not None:
            lines.append(table(("layer", "type", "backend", "time over dense, by tokens"), _rows(self.layers)))
            lines.append(f"stored in {self.path}")
            lines += [asked] if (asked := ask_for_times(installation().gpu, self.path)) else []
        lines += [
            f"{WRONG}: {one.dtype} {one.out}x{one.columns}, {one.name}: auto does not take it here"
            for one in self.wrong
        ]
        return "\n".join(lines)


def _search_json(record: AlgorithmRecord) -> dict[str, Any]:
    best = None if record.algorithm is None else asdict(record.algorithm)
    there = {"key": record.key._asdict(), "rows": record.rows, "best": best}
    return {**there, "time_us": record.time_us, "default_us": record.default_us}


def tune(job: TuneJob) -> Tuned:
    """Measure a job, and store the results."""
    tuned = Tuned(search_algorithms(job))
    for times, wrong in measure_layers(job):
        tuned.path = store_layers(times, wrong)  # at once, in case a later one fails
        tuned.layers, tuned.wrong = [*tuned.layers, *times], [*tuned.wrong, *wrong]
    return tuned


def _rows(layers: Sequence[LayerSpeed]) -> list[tuple[str, ...]]:
    """Return rows of text: layer, type, and for each pattern and backend its times over dense."""
    return [
        (
            f"{layer.out}x{layer.columns}",
            layer.dtype,
            name,
            "  ".join(
                f"{m}: {us / dense:.2f}" if us and dense else f"{m}: -"
                for m, us, dense in zip(layer.tokens, times, layer.us.get(DENSE_FORM, times), strict=True)
            ),
        )
        for layer in layers
        for name, times in layer.us.items()
        if name != DENSE_FORM
    ]
