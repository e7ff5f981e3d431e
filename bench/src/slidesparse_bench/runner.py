"""Run benchmarks inside a time budget, writing each record as soon as it exists."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from slidesparse.base.progress import progress_bar
from slidesparse.errors import InputError, SlideSparseError, UnsupportedError
from slidesparse.gemm import BACKENDS
from slidesparse.tuning.checking import WRONG
from slidesparse_bench import environment, problems
from slidesparse_bench.comparison import Session, now
from slidesparse_bench.interleaved import CudaHostStopwatch
from slidesparse_bench.kernels import gemm, grouped, lifting, linear, mixtures, pack
from slidesparse_bench.known_models import MODELS, TYPES
from slidesparse_bench.problems import Profile, select, select_patterns
from slidesparse_bench.records import ALL, GROUPED, SQUARE, Case, Record, new_records

MEASURE: dict[str, Callable[[Session, Case], list[Record]]] = {
    "pack": pack.measure,
    "kernels": lifting.measure,
    "linear": linear.measure,
    "gemm": gemm.measure,
    GROUPED: grouped.measure,
}

SHARES = {"pack": 0.05, "kernels": 0.15, "linear": 0.40, "gemm": 0.40, GROUPED: 1.0}
"""Each benchmark's share of the budget when several run; time that one leaves over goes to the next."""

LEFT_OUT = "left out: the budget was spent"

FIRST_GUESS_S = 3.0
LOOK_BACK = 6
"""The next case is expected to take as long as the longest of this many cases before it."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a run.

    Attributes:
        path: The records file.
        seconds: How long the run took.
        records: The number of records that have a time.
        refused: Reason -> the number of records that have no time for it.
        left_out: Problems for which the budget did not suffice.
        wrong: Variants whose results were wrong; they were not timed.
    """

    path: str
    seconds: float
    records: int
    refused: dict[str, int]
    left_out: tuple[str, ...]
    wrong: tuple[str, ...]

    def describe(self) -> str:
        """Return the summary as text, without a final newline."""
        lines = [f"{self.records} records in {self.seconds:.0f} s: {self.path}"]
        lines += [f"no time for {count}: {reason}" for reason, count in self.refused.items()]
        lines += [f"left out, the budget was spent: {case}" for case in self.left_out]
        lines += [f"{WRONG}: {what}" for what in self.wrong]
        return "\n".join(lines)


@dataclass
class Budget:
    """Decides whether another case still fits; ``clock`` gives seconds."""

    clock: Callable[[], float]
    deadline: float
    recent: list[float] = field(default_factory=lambda: [FIRST_GUESS_S])

    def fits(self) -> bool:
        """Return whether the next case should end before the deadline."""
        return self.clock() + max(self.recent[-LOOK_BACK:]) <= self.deadline

    def spent(self, seconds: float) -> None:
        """Learn how long a case took."""
        self.recent.append(seconds)


def adapt(
    profile: Profile,
    dtypes: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    budget_s: float | None = None,
    *,
    patterns: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    backends: Sequence[str] | None = None,
    known_models: Iterable[str] | None = None,
    known_dtypes: Iterable[str] = TYPES,
) -> Profile:
    """Return a profile with a user's choices; patterns and tokens are those of model shapes.

    Models are those of :data:`slidesparse_bench.known_models.MODELS` unless others are known.

    Raises:
        InputError: An unknown name, a pattern that is none or slides nothing, a number of tokens below 1, or a budget
            that is none.
    """
    if any(m < 1 for m in tokens or ()):
        raise InputError("tokens", got=min(tokens or ()), needed="at least 1")
    if budget_s is not None and not budget_s > 0:
        raise InputError("budget", got=budget_s, needed="a positive number of seconds")
    return replace(
        profile,
        dtypes=select(dtypes, known_dtypes, profile.dtypes, "dtype"),
        models=select(models, known_models or MODELS, profile.models, "model"),
        model_patterns=select_patterns(patterns, profile.model_patterns),
        tokens=tuple(dict.fromkeys(tokens or profile.tokens)),
        backends=select(backends, BACKENDS, profile.backends, "backend"),
        budget_s=profile.budget_s if budget_s is None else budget_s,
    )


def cuda_session(profile: Profile) -> Session:
    """Return a session on the current CUDA device.

    Args:
        profile: Its patterns, its backends, and the time that a comparison takes.

    Raises:
        UnsupportedError: When there is no such device.
    """
    environment.require_gpu()
    return Session(
        stopwatch=CudaHostStopwatch(),
        machine=environment.machine(),
        clocks=environment.clocks,
        samples_s=profile.samples_s,
        patterns=lambda case: profile.square_patterns if case.model == SQUARE else profile.model_patterns,
        backends=profile.backends or tuple(name for name in BACKENDS if name != "reference"),
        device=torch.device("cuda", torch.cuda.current_device()),
    )


def run(
    names: Sequence[str],
    profile: Profile,
    session: Session,
    path: Path,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Run benchmarks and write their records, a line each, flushed at once: an interrupted run keeps what it measured.

    Args:
        names: Benchmarks.
        profile: The problems that they cover, and the budget.
        session: The device, and how it is timed.
        path: A new file.
        clock: Seconds.

    Raises:
        InputError: When the file exists already or cannot be written.
    """
    start = clock()
    records: list[Record] = []
    with new_records(path) as file, torch.no_grad():
        total = sum(len(_cases(name, profile)) for name in names)
        with progress_bar("benchmarks", total, unit="cases") as advance:
            for found in _measure_all(names, profile, session, start, clock):
                file.writelines(record.to_line() + "\n" for record in found)
                file.flush()
                records += found
                advance(1)
    return _summary(records, path, clock() - start)


def _measure_all(
    names: Sequence[str], profile: Profile, session: Session, start: float, clock: Callable[[], float]
) -> Iterator[list[Record]]:
    """Yield the records of each case in turn; a case that does not fit gets a record that says so."""
    whole, share = sum(SHARES[name] for name in names), 0.0
    for name in sorted(names, key=list(MEASURE).index):
        share += SHARES[name]
        budget = Budget(clock, start + profile.budget_s * share / whole)
        for case in _cases(name, profile):
            if not budget.fits():
                yield [_left_out(session, case, LEFT_OUT)]
                continue
            began = clock()
            yield _measure(name, session, case)
            budget.spent(clock() - began)


def _cases(name: str, profile: Profile) -> list[Case]:
    return mixtures.cases(profile) if name == GROUPED else problems.cases(name, profile)


def _measure(name: str, session: Session, case: Case) -> list[Record]:
    try:
        return MEASURE[name](session, case)
    except torch.OutOfMemoryError:
        return [_left_out(session, case, "out of memory")]
    except SlideSparseError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(
            f"the GPU failed in {case.describe()}",
            got=str(error).partition("\n")[0],
            remedy="the records before it are in the file; start again without this case",
        ) from error


def _left_out(session: Session, case: Case, why: str) -> Record:
    unread = environment.NO_CLOCKS
    return Record(case, session.machine, now(), unread, unread, ALL, "", why_not=why)


def _summary(records: Sequence[Record], path: Path, seconds: float) -> Summary:
    refused = Counter(record.why_not for record in records if record.why_not not in (None, LEFT_OUT))
    return Summary(
        path=str(path),
        seconds=seconds,
        records=sum(record.timing is not None for record in records),
        refused={str(reason): count for reason, count in refused.items()},
        left_out=tuple(record.case.describe() for record in records if record.why_not == LEFT_OUT),
        wrong=tuple(
            f"{record.case.describe()}, {record.variant} by {record.backend} {tried.name}".rstrip()
            for record in records
            for tried in record.tried
            if (tried.why_not or "").startswith(WRONG)
        ),
    )
