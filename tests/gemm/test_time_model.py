"""Which backend runs how many tokens, by interpolated times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.gemm.speed_files import load_speeds
from slidesparse.gemm.time_model import (
    MARGIN,
    NARROW,
    decide,
    fastest,
    lean_routes_of,
    one_route_of,
    routes_of,
    time_at,
)

TOKENS = (64, 1024, 16384)
LAYERS = sorted(Path(__file__).parents[2].glob("results/*/layers*.json"))


def _layer(tokens: tuple[int, ...] = TOKENS, **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed("int8", 4096, 4096, tokens, us)


def _at(routes: tuple[Route, ...], tokens: int) -> str:
    return next(route.backend for route in reversed(routes) if route.from_tokens <= tokens)


# -- the times -------------------------------------------------------------------------------------------------------


def test_times_are_straight_lines_of_logarithms() -> None:
    layer = _layer(quick=(2.0, 8.0, 128.0))
    assert time_at(layer, "quick", 256) == pytest.approx(4.0)  # half way between 64 and 1024
    assert time_at(layer, "quick", 4096) == pytest.approx(32.0)
    assert [time_at(layer, "quick", m) for m in TOKENS] == pytest.approx([2.0, 8.0, 128.0])
    assert [time_at(layer, "quick", m) for m in (0, 1, 63)] == [2.0] * 3  # the weight is read all the same
    assert time_at(layer, "quick", 32768) == pytest.approx(256.0)


def test_next_to_an_m_without_a_time_there_is_none() -> None:
    layer = _layer(quick=(1.0, None, 1.0), late=(None, 1.0, 1.0), early=(1.0, 1.0, None))
    assert [time_at(layer, "quick", m) for m in (1, 64, 65, 1024, 16383, 16384)] == [1.0, 1.0, None, None, None, 1.0]
    assert [time_at(layer, "late", m) for m in (1, 64, 1023, 1024)] == [None, None, None, 1.0]
    assert [time_at(layer, "early", m) for m in (1024, 1025, 16384, 10**6)] == [1.0, None, None, None]


# -- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "quick", "routes"),
    [
        ((1.0, 1.0, 1.0), (0.5, 0.5, 0.5), [(0, "quick")]),
        ((1.0, 1.0, 1.0), (1.5, 1.5, 1.5), [(0, "dense")]),
        # A little slower: noise, and not worth a second form.
        ((1.0, 1.0, 1.0), (1.02, 1.02, 1.02), [(0, "quick")]),
        ((1.0, 1.0, 1.0), (1.04, 1.04, 1.04), [(0, "dense")]),
        # Between the measured M's the lines cross: no jump at one of them.
        ((1.0, 1.0, 1.0), (MARGIN / 4, 4 * MARGIN, 4 * MARGIN), [(0, "quick"), (256, "dense")]),
        ((1.0, 1.0, 1.0), (4 * MARGIN, MARGIN / 4, MARGIN / 4), [(0, "dense"), (257, "quick")]),
        # Without a time the packed form is not taken, nor is the dense one.
        ((1.0, 1.0, 1.0), (0.5, None, 0.5), [(0, "quick"), (65, "dense"), (16384, "quick")]),
        ((1.0, 1.0, 1.0), (None, None, None), [(0, "dense")]),
        ((None, 0.1, 0.1), (0.5, 0.5, 0.5), [(0, "quick"), (1024, "dense")]),
    ],
)
def test_dense_runs_where_it_is_faster_by_the_margin(
    dense: tuple[float | None, ...], quick: tuple[float | None, ...], routes: list[tuple[int, str]]
) -> None:
    assert routes_of(_layer(dense=dense, quick=quick)) == tuple(Route(*route) for route in routes)


@pytest.mark.parametrize(
    ("times", "lean"),
    [
        ({"quick": (0.8, 1.4, 0.9)}, ["quick"]),
        ({"quick": (0.8, 1.5, 0.9)}, ["quick", "dense", "quick"]),  # much slower somewhere
        ({"quick": (0.9, 1.3, 1.3)}, ["quick", "dense"]),  # slower on average
        ({"quick": (0.8, None, 0.9)}, ["quick", "dense", "quick"]),  # it cannot run there
        ({"quick": (0.8, None, None)}, ["quick", "dense"]),
        ({"quick": (1.05, 1.05, 1.05)}, ["dense"]),  # nothing to gain
        ({"quick": (0.9, 0.9, 0.9)}, ["quick"]),
        ({"quick": (None, 1.05, 0.5)}, ["dense", "quick"]),  # a copy that a gap needs runs wherever it is faster
        ({"quick": (0.8, 1.2, 1.2), "other": (1.2, 1.1, 0.7)}, ["quick", "other"]),
        # Nothing says how long dense takes, and slower on average of one M.
        ({"dense": (None,) * 3, "quick": (1.0, None, None), "other": (None, 1.0, 1.0)}, ["quick", "dense", "other"]),
        ({"dense": (1.0, None, None), "quick": (1.2, 0.5, 0.5)}, ["dense", "quick"]),
        ({"dense": (1.0, None, None), "quick": (1.05, 0.5, 0.5), "other": (None, 9.0, 9.0)}, ["quick"]),
    ],
)
def test_a_dense_copy_is_kept_only_where_a_packed_form_needs_it(
    times: dict[str, tuple[float | None, ...]], lean: list[str]
) -> None:
    layer = _layer(**{"dense": (1.0, 1.0, 1.0), **times})
    assert [route.backend for route in lean_routes_of(layer)] == lean


@pytest.mark.parametrize(
    ("six_bits", "runs"),
    [
        ((0.75, 0.9, 1.1), "six_bits"),
        ((0.9, 1.1, 1.1), "dense"),  # slower on average
        ((0.6, 0.6, 1.5), "dense"),  # much slower somewhere
        ((None, None, None), "dense"),
    ],
)
def test_a_weight_that_is_not_slid_has_one_form(six_bits: tuple[float | None, ...], runs: str) -> None:
    assert one_route_of(_layer(dense=(1.0, 1.0, 1.0), six_bits=six_bits)) == (Route(0, runs),)


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_8_bit_layer_of_a_record_keeps_a_copy_at_the_usual_patterns(path: Path) -> None:
    table = load_speeds(path)
    eight_bits = [layer for layer in table.layers if layer.dtype in ("int8", "fp8")]
    seen = 0
    for layer, pattern in product(eight_bits, ("2:4", "4:6", "6:8")):
        if (own := layer.us.get(f"hopper {pattern}")) is not None:
            seen += 1
            lean = lean_routes_of(replace(layer, us={"dense": layer.us["dense"], "hopper": own}))
            assert [route.backend for route in lean] == ["hopper"], f"{layer.dtype} {layer.out} {pattern}"
    assert seen > 30


def test_another_packed_form_needs_the_margin_too() -> None:
    quick, other = (1.0, 1.0, 1.0), (1.02, 0.98, 1.02)
    assert routes_of(_layer(dense=(9.0,) * 3, quick=quick, other=other)) == (Route(0, "quick"),)
    routes = routes_of(_layer(dense=(9.0,) * 3, quick=quick, other=(1.5, 0.7, 1.0)))
    assert [route.backend for route in routes] == ["quick", "other", "quick"]


def test_a_narrow_range_is_not_worth_a_second_form() -> None:
    tokens = (512, 600, 700, 4096)
    times = {"dense": (1.0,) * 4, "quick": (0.9, 1.1, 0.9, 0.9)}
    assert decide(_layer(tokens, **times), 600) == "dense"
    assert routes_of(_layer(tokens, **times)) == (Route(0, "quick"),)
    wide = (512, 1024, 2048, 4096)
    assert len(routes_of(_layer(wide, **times))) == 3
    # Where the packed form cannot run, the dense one does, however narrow.
    gap = {"dense": (1.0,) * 4, "quick": (0.9, None, 0.9, 0.9)}
    assert len(routes_of(_layer(tokens, **gap))) == 3


def test_a_narrow_range_stays_where_the_main_form_can_run_in_all_of_it() -> None:
    times = {"dense": (8.0, 16.0, 31.0, 90.0), "quick": (4.0, 21.0, None, 45.0), "other": (None, 17.0, 23.0, 46.0)}
    layer = _layer((512, 700, 1024, 4096), **times)
    assert fastest(layer) == "quick"
    assert time_at(layer, "quick", 700) is not None
    assert time_at(layer, "quick", 701) is None
    assert decide(layer, 701) == _at(routes_of(layer), 701) == "dense"


micros = st.floats(1.0, 100.0)


@given(st.data(), st.integers(1, 6))
def test_routes_are_what_is_decided_for_each_number_of_tokens(data: st.DataObject, points: int) -> None:
    tokens = tuple(sorted(data.draw(st.sets(st.integers(1, 3000), min_size=points, max_size=points))))
    times = st.lists(st.one_of(micros, st.none()), min_size=points, max_size=points).map(tuple)
    names = ("dense", "quick", "other", "third")
    layer = _layer(tokens, **{name: data.draw(times) for name in names})
    routes, main = routes_of(layer), fastest(layer)
    assert routes[0].from_tokens == 0
    assert all(one.backend != other.backend for one, other in pairwise(routes))
    ends = [*(route.from_tokens for route in routes[1:]), 4000]
    for route, end in zip(routes, ends, strict=True):
        for m in {max(1, route.from_tokens), (route.from_tokens + end) // 2, end - 1}:
            if 0 < m < 4000 and decide(layer, m) != route.backend:
                assert route.backend == main, "only a narrow range stays on the main form"


@given(st.lists(st.tuples(micros, micros), min_size=2, max_size=6), st.integers(1, 5000))
def test_no_choice_costs_more_than_the_margin_outside_narrow_ranges(
    times: list[tuple[float, float]], tokens: int
) -> None:
    measured = tuple(16 * 4**i for i in range(len(times)))
    dense, quick = zip(*times, strict=True)
    layer = _layer(measured, dense=dense, quick=quick)
    routes = routes_of(layer)
    taken = time_at(layer, decide(layer, tokens), tokens)
    best = min(time_at(layer, name, tokens) or 0 for name in layer.us)
    assert taken is not None
    assert taken <= best * MARGIN * (1 + 1e-9)
    assert all(
        later.from_tokens >= NARROW * one.from_tokens for one, later in pairwise(routes) if one.backend == "dense"
    )


# -- the rest --------------------------------------------------------------------------------------------------------


def test_the_fastest_over_all_token_counts() -> None:
    layer = _layer(dense=(0.1, 0.1, 0.1), quick=(1.0, 8.0, 1.0), other=(2.0, 2.0, 2.1), gap=(0.1, None, 0.1))
    assert fastest(layer) == "quick"
    assert fastest(_layer(dense=(1.0, 1.0, 1.0))) is None
    assert fastest(_layer(dense=(1.0, 1.0, 1.0), wrong=(None,) * 3)) is None
    assert fastest(_layer(gap=(0.1, None, 0.1), wrong=(None,) * 3)) == "gap"
