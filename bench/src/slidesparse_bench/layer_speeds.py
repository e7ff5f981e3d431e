"""Layer times for ``auto`` out of records of ``bench linear``: what ``slidesparse tune --from`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from slidesparse.base.cache_folder import lasting_cache_folder
from slidesparse.base.device import require_cuda
from slidesparse.errors import InputError
from slidesparse.gemm import BACKENDS, get_backend
from slidesparse.gemm.backend import release
from slidesparse.gemm.expert_times import GROUPED as EXPERTS_BACKEND
from slidesparse.gemm.select import libraries
from slidesparse.gemm.speed import Experts, LayerSpeed, WrongForm, times_key
from slidesparse.offline.tune import store_layers
from slidesparse.tuning.checking import WRONG
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.expert_sizes import GATE_UP, LAYER, MIXTURES
from slidesparse_bench.kernels.mixtures import BALANCED
from slidesparse_bench.records import DENSE_SIX_BITS, DENSE_VARIANT, GROUPED, Case, Machine, Record, read_records

WHOLE = f"{LAYER}, {BALANCED}"
"""Cases of whole layers of experts, as a server runs them."""

Sizes = tuple[str, int, int]


def recorded_layers(paths: Sequence[Path]) -> tuple[list[LayerSpeed], list[WrongForm], str | None]:
    """Return the layer times of records that ``slidesparse bench linear`` made on this GPU, what was wrong, the driver.

    Raises:
        InputError: They are of another GPU, of other libraries or of two drivers, or hold no such times.
        UnsupportedError: There is no CUDA device, or no folder to keep the times in.
    """
    require_cuda("slidesparse tune --from")
    lasting_cache_folder()
    records = read_records(paths)
    here = torch.cuda.get_device_name()
    other_gpus = {record.machine.gpu for record in records} - {here}
    if other_gpus:
        raise InputError("records of another GPU", got=", ".join(sorted(other_gpus)), needed=here)
    now, machines = libraries(), {record.machine for record in records}
    for machine in machines:
        then = libraries_of(machine)
        other = [name for name in then if name in now and then[name] != now[name]]
        if other:  # filed under the libraries of today, their times would count for those
            raise InputError(
                "records of other libraries",
                got="; ".join(then[name] for name in other),
                needed="; ".join(now[name] for name in other),
                remedy="measure again: slidesparse bench linear",
            )
    layers, drivers = layer_speeds(records), {machine.driver for machine in machines}
    if len(drivers) > 1:
        raise InputError("records of several drivers", got=sorted(map(str, drivers)), needed="those of one at a time")
    return layers, wrong_forms(records), drivers.pop()


def mark_wrong(path: Path) -> list[WrongForm]:
    """Put what was wrong in records that were just made here into the user's table, and return it.

    Raises:
        UnsupportedError: The table cannot be written.
    """
    wrong = wrong_forms(read_records([path]))
    if wrong:
        store_layers([], wrong)
    return wrong


def libraries_of(machine: Machine) -> dict[str, str]:
    """Return what :func:`slidesparse.gemm.select.libraries` gave where records were made, as far as they tell."""
    dense = release("torch", machine.torch)
    if machine.vllm is not None:
        dense = f"{release('vLLM', machine.vllm)}, {dense}"
    found = {DENSE_VARIANT: dense}
    if machine.cusparselt is not None:
        found["cusparselt"] = release("cuSPARSELt", machine.cusparselt)
    return found


def layer_speeds(records: Iterable[Record]) -> list[LayerSpeed]:
    """Return the times of our own layers in records of ``bench linear``, of each problem the latest.

    Whole layers of experts, in records of ``bench gemm --grouped``, are among them; tokens chose by chance there.
    A form that was wrong at one number of tokens has no time at any.

    Raises:
        InputError: There are none.
    """
    records = list(records)
    timed = [record for record in records if record.timing is not None]
    linears, experts = _latest(timed, _is_of_linear), _latest(timed, _is_of_experts)
    layers = _layers(linears, _sizes_of_linear, _key) + _layers(experts, _sizes_of_experts, _key_of_experts)
    if not layers:
        raise InputError("records without a layer's time", remedy="pass records of slidesparse bench linear")
    wrong = wrong_forms(records)
    return [layer.without(form.name for form in wrong if form.is_of(layer)) for layer in layers]


def wrong_forms(records: Iterable[Record]) -> list[WrongForm]:
    """Return the packed forms of layers whose result was wrong when one of their problems was last measured."""
    records = list(records)
    linears, experts = _latest(records, _is_of_linear), _latest(records, _is_of_experts)
    wrong = _wrong_of(linears, _sizes_of_linear, _key) + _wrong_of(experts, _sizes_of_experts, _key_of_experts)
    return list(dict.fromkeys(wrong))


def _wrong_of(
    latest: Mapping[Case, list[Record]], sizes_of: Callable[[Case], Sizes], key: Callable[[Record], str | None]
) -> list[WrongForm]:
    return [
        WrongForm(*sizes_of(case), name, _experts_of(case))
        for case, found in latest.items()
        for record in found
        # Dense that is wrong is a fault of no packed form, and always runs.
        if record.variant != DENSE_VARIANT and (record.why_not or "").startswith(WRONG)
        if (name := key(record)) is not None
    ]


def _latest(records: Iterable[Record], wanted: Callable[[Record], bool]) -> dict[Case, list[Record]]:
    latest: dict[Case, list[Record]] = {}
    for record in filter(wanted, records):
        known = latest.setdefault(record.case, [])
        if known and known[0].started < record.started:
            known.clear()
        if not known or known[0].started == record.started:
            known.append(record)
    return latest


def _layers(
    latest: Mapping[Case, list[Record]], sizes_of: Callable[[Case], Sizes], key: Callable[[Record], str | None]
) -> list[LayerSpeed]:
    layers: dict[tuple[Sizes, Experts | None], dict[int, list[Record]]] = {}
    for case, found in latest.items():
        layers.setdefault((sizes_of(case), _experts_of(case)), {})[case.tokens] = found
    return [_layer(sizes, experts, by_tokens, key) for (sizes, experts), by_tokens in layers.items()]


def _layer(
    sizes: Sizes, experts: Experts | None, by_tokens: dict[int, list[Record]], key: Callable[[Record], str | None]
) -> LayerSpeed:
    tokens = sorted(by_tokens)
    times = {m: {key(record): _median_us(record) for record in by_tokens[m]} for m in tokens}
    names = dict.fromkeys(name for column in times.values() for name in column if name is not None)
    us = {name: tuple(times[m].get(name) for m in tokens) for name in names}
    return LayerSpeed(*sizes, tuple(tokens), us, experts)


def _sizes_of_linear(case: Case) -> Sizes:
    return case.dtype, case.out_features, case.in_features


def _sizes_of_experts(case: Case) -> Sizes:
    return case.dtype, *MIXTURES[case.model].shape(GATE_UP)


def _experts_of(case: Case) -> Experts | None:
    if case.benchmark != GROUPED:
        return None
    sizes = MIXTURES[case.model]
    return Experts(sizes.experts, sizes.experts, sizes.top_k)


def _is_of_linear(record: Record) -> bool:
    return record.case.benchmark == "linear" and _key(record) is not None


def _is_of_experts(record: Record) -> bool:
    """Return whether a record is of a whole layer of experts, ours on a GPU or vLLM's."""
    case = record.case
    whole = case.benchmark == GROUPED and case.model in MIXTURES and case.layer == WHOLE
    return whole and (record.variant == DENSE_VARIANT or record.backend == EXPERTS_BACKEND)


def _key_of_experts(record: Record) -> str:
    return DENSE_VARIANT if record.variant == DENSE_VARIANT else times_key(EXPERTS_BACKEND, record.variant)


def _key(record: Record) -> str | None:
    """Return the table's key for a record's time; None when it is none of our layers that ``auto`` may take."""
    if record.backend not in BACKENDS:
        return None
    if record.backend == DENSE_VARIANT:
        return DENSE_VARIANT if record.variant == DENSE_VARIANT else None
    pattern = DENSE_VARIANT if record.variant == DENSE_SIX_BITS else record.variant
    if not get_backend(record.backend).accelerated or not _is_pattern(pattern):
        return None
    return times_key(record.backend, pattern)


def _is_pattern(text: str) -> bool:
    try:
        return str(Pattern.parse(text)) == text
    except InputError:
        return False


def _median_us(record: Record) -> float | None:
    return None if record.timing is None else round(record.timing.median_us, 2)
