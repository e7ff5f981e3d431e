"""A model of a layer's time for any number of tokens, and the fastest backend for each.

Times are interpolated between the measured M's, linearly in the logarithms of time and M. Below the fewest measured
tokens a time is constant, like that of reading the weight; above the most it grows with M.

One packed form, the fastest over all M's, runs wherever no other backend is faster by :data:`MARGIN`. Noise then
changes no backend: a model's layers stay on one, and the same batch always takes the same path.

A dense copy of a packed weight doubles the memory of a layer, and layers that change their backend leave their chains,
which costs the host. So :func:`lean_routes_of` keeps one only where the packed form needs it. As served, 6:8 of
a 7B model in INT8 took 12.7 s for a mixed load without copies and 13.1 s with them
(results/h200/serve/qwen2.5-7b-int8-6of8-one-form.jsonl and -two-forms.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise

from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed

MARGIN = 1.03
"""Least time of the main packed form over another backend's for the other to run. A second form costs memory, and
differences of a few percent are noise."""

NEEDS_A_COPY = 1.5
"""Time of the packed form over dense at some M from which a dense copy is kept. Short measurements of one M differ by a
fifth from start to start, and so would a stricter rule."""

NEEDS_A_COPY_ON_AVERAGE = 1.1
"""The same on average over the measured M's."""

NARROW = 1.5
"""Least factor between the ends of a range of M's that is worth a second form of the weight."""


def time_at(layer: LayerSpeed, name: str, tokens: float) -> float | None:
    """Return the microseconds of a backend at M ``tokens``; None next to an M without a time."""
    points = list(zip(layer.tokens, layer.us[name], strict=True))
    if tokens <= layer.tokens[0]:
        return points[0][1]
    for (m, us), (n, after) in pairwise(points):
        if m <= tokens <= n and us is not None and after is not None:
            return us * math.exp(math.log(after / us) * math.log(tokens / m) / math.log(n / m))
    m, us = points[-1]
    return None if us is None or tokens < m else us * tokens / m


def fastest(layer: LayerSpeed) -> str | None:
    """Return the packed form with the smallest product of times over all M's; None without packed times.

    A form with more times goes before one with fewer.
    """
    known = {name: [us for us in times if us] for name, times in layer.us.items() if name != DENSE_FORM}
    rank = {name: (-len(times), sum(map(math.log, times))) for name, times in known.items() if times}
    return min(rank, key=lambda name: rank[name], default=None)


def decide(layer: LayerSpeed, tokens: float) -> str:
    """Return the backend for M ``tokens``: the main packed form, or one that is faster by the margin."""
    main = fastest(layer)
    times = {name: us for name in layer.us if (us := time_at(layer, name, tokens)) is not None}
    best = min(times, key=lambda name: times[name], default=DENSE_FORM)
    if not times.keys() - {DENSE_FORM}:
        return DENSE_FORM
    packed = min(times.keys() - {DENSE_FORM}, key=lambda name: times[name] * (1 if name == main else MARGIN))
    return best if MARGIN * times[best] <= times[packed] else packed


@lru_cache(maxsize=1024)
def routes_of(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return the routes of :func:`decide` over all numbers of tokens.

    A range below :data:`NARROW` stays on the main packed form, if that can run in all of it.
    """
    starts = {0, *(at for near in _changes(layer) for at in (near - 1, near, near + 1))}
    routes = _joined(Route(start, decide(layer, max(start, 1))) for start in sorted(starts))
    main = fastest(layer)
    if main is None:
        return routes
    ends = [*(route.from_tokens for route in routes[1:]), math.inf]
    return _joined(
        Route(route.from_tokens, main)
        if route.from_tokens > end / NARROW and _can_run(layer, main, route.from_tokens, int(end) - 1)
        else route
        for route, end in zip(routes, ends, strict=True)
    )


@lru_cache(maxsize=1024)
def lean_routes_of(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return :func:`routes_of` a layer, without dense routes that packed forms do not need."""
    routes, packed = routes_of(layer), {name: us for name, us in layer.us.items() if name != DENSE_FORM}
    if len(routes) == 1:
        return routes
    lean = routes_of(replace(layer, us=packed))
    if DENSE_FORM in {route.backend for route in lean}:  # the packed forms lack a time somewhere
        return routes
    best = (min((us for us in at if us), default=None) for at in zip(*packed.values(), strict=True))
    shares = [us / dense for us, dense in zip(best, layer.us[DENSE_FORM], strict=True) if us and dense]
    return routes if _much_longer(shares, NEEDS_A_COPY_ON_AVERAGE) else lean


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


def _can_run(layer: LayerSpeed, name: str, first: int, last: int) -> bool:
    """Return whether a backend has times from the first to the last number of tokens."""
    measured = (m for m in layer.tokens if first < m < last)
    return all(time_at(layer, name, m) is not None for m in (first, *measured, last))


def _joined(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return routes with neighbours on the same backend joined."""
    kept: list[Route] = []
    for route in routes:
        if not kept or kept[-1].backend != route.backend:
            kept.append(route)
    return tuple(kept)


def _changes(layer: LayerSpeed) -> Iterator[int]:
    """Yield the numbers of tokens, give or take one, at which the decision may change."""
    yield from layer.tokens
    for one, other in combinations(layer.us.values(), 2):
        shares = [math.log(us / than) if us and than else None for us, than in zip(one, other, strict=True)]
        for (m, start), (n, end) in pairwise(zip(layer.tokens, shares, strict=True)):
            if start is None or end is None or start == end:
                continue
            for bound in (-math.log(MARGIN), 0.0, math.log(MARGIN)):
                at = (bound - start) / (end - start)  # the logarithm of the share is a straight line in that of M
                if 0 < at < 1:
                    yield math.ceil(m * (n / m) ** at)


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
