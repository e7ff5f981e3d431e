"""The part of a load in which its engine is full: some requests run, and others wait for their places."""

from __future__ import annotations

from collections.abc import Sequence

from slidesparse_bench.serve.serve_measured import Round
from slidesparse_bench.serve.serve_options import SEQUENCES
from slidesparse_bench.serve.serve_power import PowerMeter
from slidesparse_bench.served_figures import Steady


def steady_spans(rounds: Sequence[Round], places: int = SEQUENCES) -> list[tuple[float, float]]:
    """When each repeat of a load that is asked at once was steady, on the clock of its rounds.

    From the end of the first answer, when the prompts of the beginning are through and a new request takes a place, to
    the moment when the requests left run all at once. Repeats without such a time are left out.

    Args:
        rounds: The repeats.
        places: Requests that run at a time.
    """
    spans = []
    for one in rounds:
        ends = sorted(one.started + answer.times[-1] for answer in one.answers if answer.times)
        if len(ends) > places + 1:
            spans.append((ends[0], ends[len(ends) - places - 1]))
    return spans


def steady(rounds: Sequence[Round], meter: PowerMeter | None) -> Steady | None:
    """The GPU in that time; None where there was none."""
    spans = steady_spans(rounds)
    if not spans:
        return None
    seconds = sum(end - begin for begin, end in spans)
    return Steady(seconds, meter.busy_during(spans) if meter is not None else None)
