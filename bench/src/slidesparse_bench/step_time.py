"""What a step of a model takes as it is served: measured times of its linears, and constants for all else.

A load is one step of some tokens, ``prefill:4096`` or ``decode:64``, or all steps of a mixed load. Linears that read
one input are one layer then. Their times come from where a server that loads the model takes them: measured on this
machine, or a prior that is named (:mod:`slidesparse.gemm.speed`). Two sorts of constants in ``served_steps.json`` make
them what was served, and ``benchmarks/served_steps.py`` writes both from records:

- A **factor** for each form of the linears (dense, 6:8, 4:6, 2:4) is what their times are multiplied by: a GPU at its
  power limit has another clock with each, and none need be that of the timing. Another pattern takes that of the form
  nearest in density.
- The **rest** is what host, norms, activations and attention add: served steps less these products, divided by the
  model's layers, of stock vLLM and of the plugin. It also holds what the times of all forms have wrong alike.

So a model whose linears all have one form takes what was served, and a plan lies between such models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from slidesparse.base.counted import counted
from slidesparse.base.typed_json import decode, load_json
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm import Problem
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.select import backends_to_compare, can_be_timed, find_among, find_measured
from slidesparse.gemm.speed import DENSE as DENSE_FORM
from slidesparse.gemm.speed import LayerSpeed, MeasuredLayer
from slidesparse.gemm.speed_files import PACKAGED, file_name, load_speeds, tables_for
from slidesparse.gemm.time_model import lean_routes_of, time_at
from slidesparse.offline.plan.choose_patterns import PlanSet
from slidesparse.offline.plan.plan_options import PlanOptions
from slidesparse.offline.plan.plan_sets import PlannedSets
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import parse_dtype

SERVED_STEPS = Path(__file__).parent / "served_steps.json"

SHIPPED_GPU = "NVIDIA H200"
"""The GPU that a model is planned for on a machine without one. It has constants of every type."""

GPUS = {"H100": "NVIDIA H100 80GB HBM3", "H200": SHIPPED_GPU}
"""What people call a GPU that has constants -> its name."""

USUALLY_TIMED = tuple(map(Pattern.parse, ("2:4", "4:6", "6:8")))
"""Patterns that the shipped tables have of every size in 8 bits, so that dense was compared with them."""

MOST_TOKENS = 10**6
"""Most tokens of a step that is asked for."""

WIDE = "bf16"
"""The type whose times linears take that keep the type of the source; FP16 takes the same, and servers round FP32."""


@dataclass(frozen=True)
class Rest:
    """Microseconds a decoder layer for all but linears: of stock vLLM, and of the plugin with any form of them."""

    stock: float
    plugin: float


@dataclass(frozen=True)
class Steps:
    """Steps of a load that are alike.

    Attributes:
        count: How many.
        tokens: Of each.
        rest: What each takes besides linears.
    """

    count: int
    tokens: float
    rest: Rest


@dataclass(frozen=True)
class Loads:
    """Constants of one type of weights.

    Attributes:
        prefill: For each token of a step that reads prompts.
        decode: For a step in which sequences go on by a token each.
        mixed: Steps of a mixed load.
        factors: Of ``prefill``, ``decode`` and ``mixed``: form of linears -> what their times are multiplied by.
    """

    prefill: Rest
    decode: Rest
    mixed: tuple[Steps, ...]
    factors: dict[str, dict[str, float]]


@dataclass(frozen=True)
class ServedSteps:
    """The constants of one GPU.

    Attributes:
        source: Model, GPU and engine of the records.
        dtypes: Type of weights -> its constants.
    """

    source: str
    dtypes: dict[str, Loads]


def served_steps(dtype: str, gpu: str = SHIPPED_GPU) -> ServedSteps:
    """Return the constants of a GPU, or those of :data:`SHIPPED_GPU` where it has none of a type of weights.

    Raises:
        UnsupportedError: There are none of the type.
    """
    known = _known_steps()
    for name in (gpu, SHIPPED_GPU):
        if name in known and dtype in known[name].dtypes:
            return known[name]
    raise UnsupportedError("loads of a plan", got=dtype, needed=" or ".join(known[SHIPPED_GPU].dtypes))


@lru_cache(maxsize=1)
def _known_steps() -> dict[str, ServedSteps]:
    """Name of a GPU -> what the package's file holds of it."""
    return {gpu: decode(ServedSteps, value, gpu) for gpu, value in load_json(SERVED_STEPS).items()}


def parse_load(text: str, loads: Loads) -> tuple[Steps, ...]:
    """Return the steps of ``mixed``, ``prefill:TOKENS`` or ``decode:SEQUENCES``.

    Raises:
        InputError: It is anything else.
    """
    kind, colon, number = text.partition(":")
    if text == "mixed":
        return loads.mixed
    needed = f"mixed, prefill:TOKENS or decode:SEQUENCES, of 1 to {MOST_TOKENS}"
    if not colon or not number.isascii() or not number.isdigit() or not 1 <= int(number[:8]) <= MOST_TOKENS:
        raise InputError("load of a plan", got=repr(text), needed=needed)
    tokens = int(number[:8])
    if kind == "prefill":
        return (Steps(1, tokens, Rest(tokens * loads.prefill.stock, tokens * loads.prefill.plugin)),)
    if kind == "decode":
        return (Steps(1, tokens, loads.decode),)
    raise InputError("load of a plan", got=repr(text), needed=needed)


class LayerTimes:
    """Measured times of layers of one type, by size and pattern.

    Args:
        dtype: ``int8`` or ``fp8``.
        device: Where the model will run: of a GPU the times that a server there goes by, of a CPU those that ship with
            the package.
        gpu: Which of these.
        bits: Bits of a kept value in memory. Of six bits those of eight are a prior.

    Attributes:
        gpu: The GPU whose times they are.
    """

    def __init__(self, dtype: str, device: torch.device, gpu: str = SHIPPED_GPU, bits: int = 8) -> None:
        self.dtype, self.device, self.bits = dtype, device, bits
        self.gpu = torch.cuda.get_device_name(device) if can_be_timed(device) else gpu
        self._found: dict[tuple[str, int, int], MeasuredLayer | None] = {}

    def find(self, pattern: Pattern, out: int, columns: int) -> MeasuredLayer | None:
        """Return the times by which a pattern's backend is chosen; None where nothing like it was measured."""
        key = str(pattern), out, columns
        if key not in self._found:
            self._found[key] = self._look_up(pattern, out, columns)
        return self._found[key]

    def _look_up(self, pattern: Pattern, out: int, columns: int) -> MeasuredLayer | None:
        problem = Problem(pattern, parse_dtype(self.dtype), out, columns, self.device, bits=self.bits)
        if can_be_timed(self.device):
            names = backends_to_compare(problem)
            return find_measured(problem, names) if names else None
        shipped = load_speeds(PACKAGED / file_name(self.gpu))
        assert shipped is not None
        there = shipped.installation
        tables = [table for table in tables_for(there) if table.packaged]
        # One revision of the kernel runs both.
        there = replace(there, libraries={HopperSixBits.name: there.libraries[Hopper.name], **there.libraries})
        names = [DENSE_FORM, HopperSixBits.name if self.bits == HopperSixBits.bits else Hopper.name]
        return find_among(tables, there, problem, names)

    def us(self, one: PlanSet, pattern: Pattern, among: Sequence[Pattern], tokens: float) -> float:
        """Return the microseconds of a set's linears as one layer.

        All patterns go with one dense time. One that was compared with another, on another GPU or at another size,
        takes its share of that: times of two comparisons say nothing of each other.

        Args:
            one: The set.
            pattern: Its pattern.
            among: Patterns that have times, each compared with dense.
            tokens: M.

        Raises:
            UnsupportedError: No layer like it was measured with the pattern.
        """
        out, columns = joined_size(one)
        found = [self.find(timed, out, columns) for timed in dict.fromkeys((*among, *USUALLY_TIMED))]
        nearest = min(filter(None, found), key=lambda near: near.rank(self.gpu, out, columns), default=None)
        compared = nearest if pattern == DENSE else self.find(pattern, out, columns)
        if nearest is not None and compared is not None:
            layer = compared.layer.of_size(out, columns)
            us = time_at(layer, DENSE_FORM if pattern == DENSE else _backend(layer, tokens), tokens)
            dense = time_at(nearest.layer.of_size(out, columns), DENSE_FORM, tokens)
            than = time_at(layer, DENSE_FORM, tokens)
            if us is not None and dense is not None and than is not None:
                return us * (dense / than)
        raise self.lacking(one, pattern)

    def lacking(self, one: PlanSet, *patterns: Pattern) -> UnsupportedError:
        """Return the error of a set that has no times."""
        where = "" if can_be_timed(self.device) else f" on a machine with an {self.gpu}, and plan there"
        out, columns = joined_size(one)
        return UnsupportedError(
            f"no layer like {one.names[0]} was measured",
            got=f"{', '.join(map(str, patterns))}, {self.dtype}, {out}x{columns}",
            remedy=f"measure it with slidesparse tune --dtype {self.dtype}{where}; or leave out --at",
        )

    def basis(self, patterns: Sequence[Pattern], sets: Sequence[PlanSet]) -> list[str]:
        """Return what the times of sets and patterns rest on, in words, the most frequent first."""
        sizes = [joined_size(one) for one in sets for _ in patterns]
        found = [self.find(pattern, *joined_size(one)) for one in sets for pattern in patterns]
        told = [self._describe(one, size) for one, size in zip(found, sizes, strict=True) if one is not None]
        return [f"linears ({count} of {len(found)}): {text}" for text, count in Counter(told).most_common()]

    def _describe(self, found: MeasuredLayer, size: tuple[int, int]) -> str:
        if can_be_timed(self.device):
            return found.describe()
        other = "" if (found.layer.out, found.layer.columns) == size else ", of layers of other sizes"
        other += "".join(f", of {there} in place of {here}" for there, here in found.others if here in found.layer.us)
        return f"times of an {found.gpu}, which ship with the package{other}"


def _backend(layer: LayerSpeed, tokens: float) -> str:
    routes = lean_routes_of(layer)
    return next(route.backend for route in reversed(routes) if route.from_tokens <= tokens)


def joined_size(one: PlanSet) -> tuple[int, int]:
    """Return rows and columns of a set's linears as one layer: servers join those that read one input."""
    return sum(out for out, _ in one.shapes), one.shapes[0][1]


@dataclass(frozen=True)
class ServedTime:
    """The time of a load, a :class:`slidesparse.offline.plan.choose_patterns.StepTime` in microseconds.

    Attributes:
        name: The load.
        steps: Its steps.
        factors: Form of linears -> what their times are multiplied by.
        layers: Decoder layers of the model.
        times: Of its linears.
        patterns: Those that have times.
        left_alone: Microseconds of the linears that are left alone, by stock vLLM and by the plugin.
    """

    name: str
    steps: tuple[Steps, ...]
    factors: dict[str, float]
    layers: int
    times: LayerTimes
    patterns: tuple[Pattern, ...]
    left_alone: float = 0.0

    @property
    def rest(self) -> float:
        """See :class:`slidesparse.offline.plan.choose_patterns.StepTime`."""
        return self.left_alone + self.layers * sum(step.count * step.rest.plugin for step in self.steps)

    @property
    def rest_before(self) -> float:
        """See :class:`slidesparse.offline.plan.choose_patterns.StepTime`; of stock vLLM."""
        return self.left_alone + self.layers * sum(step.count * step.rest.stock for step in self.steps)

    def of(self, one: PlanSet, pattern: Pattern) -> float:
        """See :class:`slidesparse.offline.plan.choose_patterns.StepTime`.

        Raises:
            UnsupportedError: No layer like it was measured.
        """
        us = sum(step.count * self.times.us(one, pattern, self.patterns, step.tokens) for step in self.steps)
        return factor_of(pattern, self.factors) * us


def factor_of(pattern: Pattern, factors: Mapping[str, float]) -> float:
    """Return the factor of the form that is nearest to a pattern in density.

    >>> factor_of(Pattern.parse("8:10"), {"dense": 1.02, "6:8": 0.99, "2:4": 1.01})
    0.99
    """
    return factors[min(factors, key=lambda form: abs(Pattern.parse(form).density - pattern.density))]


def served_times(
    loads: Sequence[str],
    layers: int,
    times: LayerTimes,
    patterns: Sequence[Pattern],
    left_alone: Sequence[PlanSet] = (),
) -> list[ServedTime]:
    """Return the time of each load.

    Args:
        loads: As :func:`parse_load` takes them.
        layers: Decoder layers.
        times: Of linears.
        patterns: Those that have times.
        left_alone: Linears that stay dense in the type of the source.

    Raises:
        InputError: A load is none.
        UnsupportedError: The type has no constants, or a linear that is left alone no times.
    """
    constants, found = served_steps(times.dtype, times.gpu).dtypes[times.dtype], []
    wide = LayerTimes(WIDE, times.device, times.gpu)
    for text in dict.fromkeys(loads):
        steps, factors = parse_load(text, constants), constants.factors[text.partition(":")[0]]
        us = sum(step.count * wide.us(one, DENSE, patterns, step.tokens) for step in steps for one in left_alone)
        found.append(ServedTime(text, steps, factors, layers, times, tuple(patterns), us))
    return found


def check_loads(loads: Sequence[str], gpu: str | None, dtype: str) -> None:
    """Refuse loads, or a GPU's short name, that nothing is known of.

    Raises:
        InputError: One of them is unknown.
        UnsupportedError: There are no constants of the type.
    """
    if gpu is not None and gpu not in GPUS:
        raise InputError("--gpu", got=gpu, needed=" or ".join(GPUS))
    for load in loads:
        parse_load(load, served_steps(dtype).dtypes[dtype])


def times_of(
    options: PlanOptions, planned: PlannedSets, patterns: Sequence[Pattern], layers: int, device: torch.device
) -> tuple[list[ServedTime], list[Pattern], tuple[str, ...]]:
    """Return what the loads of a plan take, the patterns of which that is known, and what it rests on.

    Raises:
        InputError: A load is none.
        UnsupportedError: Not one of the patterns was measured on all layers, or linears that stay dense were not.
    """
    if options.gpu is None:
        times = LayerTimes(options.dtype, device, bits=options.bits)
    else:
        times = LayerTimes(options.dtype, torch.device("cpu"), GPUS[options.gpu], options.bits)
    sets = planned.with_choices(())
    timed = [p for p in patterns if all(times.find(p, *joined_size(one)) for one in sets)]
    served = served_times(options.at, layers, times, timed, planned.dense)
    if patterns and not timed:
        unknown = (one for one in sets if not any(times.find(p, *joined_size(one)) for p in patterns))
        raise times.lacking(next(unknown, sets[0]), *patterns)
    left_out = ", ".join(str(pattern) for pattern in patterns if pattern not in timed)
    alone = sum(len(one.names) for one in planned.dense)
    served_so = "as served" if options.recipe == "absmax" else "as served with eight bits"
    basis = [
        *times.basis(timed, sets),
        *([f"{counted(alone, 'linear')} left alone: in 16 bits, in stock vLLM too"] if alone else []),
        f"all else {served_so}: {served_steps(options.dtype, times.gpu).source}",
        *([f"left out, since not measured: {left_out}"] if left_out else []),
    ]
    return served, timed, tuple(basis)
