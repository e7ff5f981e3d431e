"""The fastest backend for each number of tokens, by a layer's measured times.

A decision at a measured M holds up to half way to the next one, on a logarithmic scale, and past the last one.

One packed form, the fastest over all M's, runs wherever no other backend is faster by :data:`MARGIN`. Noise then
changes no backend: a model's layers stay on one, and the same batch always takes the same path.

A second form of a weight doubles the memory of a layer, and layers that change their backend leave their chains, which
costs the host. So :func:`lean_routes_of` keeps one only where the main packed form needs it. As served, 6:8 of
a 7B model in INT8 took 12.7 s for a mixed load without copies and 13.1 s with them
(results/h200/serve/qwen2.5-7b-int8-6of8-one-form.jsonl and -two-forms.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed

MARGIN = 1.03
"""Least time of the main packed form over another backend's for the other to run. A second form costs memory, and
differences of a few percent are noise."""

NEEDS_A_COPY = 1.5
"""Time of the packed form over dense at some M from which another one is kept. Short measurements of one M differ by a
fifth from start to start, and so would a stricter rule."""

NEEDS_A_COPY_ON_AVERAGE = 1.1
"""The same on average over the measured M's."""


def fastest(layer: LayerSpeed) -> str | None:
    """Return the packed form with the smallest product of times over all M's; None without packed times.

    A form with more times goes before one with fewer.
    """
    known = {name: [us for us in times if us] for name, times in layer.us.items() if name != DENSE_FORM}
    rank = {name: (-len(times), sum(map(math.log, times))) for name, times in known.items() if times}
    return min(rank, key=lambda name: rank[name], default=None)


def decide(times: Mapping[str, float | None], main: str | None) -> str:
    """Return the backend by the times at one M: the main packed form, or one that is faster by the margin."""
    known = {name: us for name, us in times.items() if us is not None}
    packed = {name: us * (1 if name == main else MARGIN) for name, us in known.items() if name != DENSE_FORM}
    if not packed:
        return DENSE_FORM
    best, form = min(known, key=lambda name: known[name]), min(packed, key=lambda name: packed[name])
    return best if MARGIN * known[best] <= known[form] else form


@lru_cache(maxsize=1024)
def routes_of(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return the routes of :func:`decide` over all numbers of tokens.

    No packed form runs between an M with its time and one without.
    """
    main, columns = fastest(layer), [layer.column(index) for index in range(len(layer.tokens))]
    taken = [decide(times, main) for times in columns]
    routes = [Route(0, taken[0])]
    for index, (m, n) in enumerate(pairwise(layer.tokens)):
        before, after = taken[index : index + 2]
        if before == after:
            continue
        ends, begins = columns[index + 1].get(before) is None, columns[index].get(after) is None
        if ends and begins and before != DENSE_FORM:
            routes.append(Route(m + 1, DENSE_FORM))
        routes.append(Route(n if begins else m + 1 if ends else math.isqrt(m * n) + 1, after))
    return tuple(routes)


@lru_cache(maxsize=1024)
def lean_routes_of(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return :func:`routes_of` a layer through the fewest forms: the main packed one, else all packed, else all."""
    routes, packed = routes_of(layer), {name: us for name, us in layer.us.items() if name != DENSE_FORM}
    if len(routes) == 1:
        return routes
    for kept in ({name: packed[name] for name in packed if name == fastest(layer)}, packed):
        lean = routes_of(replace(layer, us=kept))
        if DENSE_FORM in {route.backend for route in lean}:  # they lack a time somewhere
            continue
        best = (min((us for us in at if us), default=None) for at in zip(*kept.values(), strict=True))
        shares = [us / dense for us, dense in zip(best, layer.us[DENSE_FORM], strict=True) if us and dense]
        if not _much_longer(shares, NEEDS_A_COPY_ON_AVERAGE):
            return lean
    return routes


@lru_cache(maxsize=1024)
def one_route_of(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return the only route of a weight that is not slid: its six bits, or dense where they do not gain on average.

    Both forms would take more memory than six bits save.
    """
    name = fastest(layer)
    times = zip(layer.us.get(name or "", ()), layer.us[DENSE_FORM], strict=False)
    shares = [us / dense for us, dense in times if us and dense]
    return (Route(0, DENSE_FORM if name is None or not shares or _much_longer(shares, 1.0) else name),)


def _much_longer(shares: Sequence[float], on_average: float) -> bool:
    """Return whether times over dense's are too long: one of them, or their geometric mean."""
    average = math.exp(sum(map(math.log, shares)) / max(1, len(shares)))
    return max(shares, default=0.0) >= NEEDS_A_COPY or average >= on_average


def explain(layer: LayerSpeed) -> str:
    """Return a layer's times over dense in words: ``hopper takes 0.77 to 1.08 of dense's time``."""
    forms = []
    for name in layer.us:
        shares = [us / dense for us, dense in zip(layer.us[name], layer.us[DENSE_FORM], strict=True) if us and dense]
        if name != DENSE_FORM:
            low, high = (f"{bound(shares):.2f}" if shares else "" for bound in (min, max))
            span = low if low == high else f"{low} to {high}"
            forms.append(f"{name} takes {span} of dense's time" if shares else f"{name} has no time")
    return ", ".join(forms)
