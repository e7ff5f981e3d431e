"""Which backend runs how many tokens, by measured times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.gemm.speed_files import load_speeds
from slidesparse.gemm.time_model import (
    fastest,
    lean_routes_of,
    one_route_of,
    routes_of,
)

TOKENS = (64, 1024, 16384)
LAYERS = sorted(Path(__file__).parents[2].glob("results/*/layers*.json"))


def _layer(tokens: tuple[int, ...] = TOKENS, **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed("int8", 4096, 4096, tokens, us)


# -- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "quick", "routes"),
    [
        ((1.0, 1.0, 1.0), (0.5, 0.5, 0.5), [(0, "quick")]),
        ((1.0, 1.0, 1.0), (1.5, 1.5, 1.5), [(0, "dense")]),
        # A little slower: noise, and not worth a second form.
        ((1.0, 1.0, 1.0), (1.02, 1.02, 1.02), [(0, "quick")]),
        ((1.0, 1.0, 1.0), (1.04, 1.04, 1.04), [(0, "dense")]),
        # Half way between the measured M's.
        ((1.0, 1.0, 1.0), (0.5, 2.0, 2.0), [(0, "quick"), (257, "dense")]),
        ((1.0, 1.0, 1.0), (2.0, 2.0, 0.5), [(0, "dense"), (4097, "quick")]),
        # Next to an M without a time the packed form is not taken, nor is the dense one.
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
        ({"quick": (0.8, 1.2, 1.2), "other": (1.2, 1.1, 0.7)}, ["other"]),  # nor a second packed form
        (
            {"quick": (0.8, 1.6, 1.0), "other": (1.6, 0.8, 1.1)},
            ["quick", "other", "quick"],
        ),  # both are needed
        # Nothing says how long dense takes, and slower on average of one M.
        ({"dense": (None,) * 3, "quick": (1.0, None, None), "other": (None, 1.0, 1.0)}, ["quick", "dense", "other"]),
        ({"dense": (1.0, None, None), "quick": (1.2, 0.5, 0.5)}, ["dense", "quick"]),
        ({"dense": (1.0, None, None), "quick": (1.05, 0.5, 0.5), "other": (None, 9.0, 9.0)}, ["quick"]),
    ],
)
def test_another_form_is_kept_only_where_the_main_packed_one_needs_it(
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


# -- the rest --------------------------------------------------------------------------------------------------------


def test_the_fastest_over_all_token_counts() -> None:
    layer = _layer(dense=(0.1, 0.1, 0.1), quick=(1.0, 8.0, 1.0), other=(2.0, 2.0, 2.1), gap=(0.1, None, 0.1))
    assert fastest(layer) == "quick"
    assert fastest(_layer(dense=(1.0, 1.0, 1.0))) is None
    assert fastest(_layer(dense=(1.0, 1.0, 1.0), wrong=(None,) * 3)) is None
    assert fastest(_layer(gap=(0.1, None, 0.1), wrong=(None,) * 3)) == "gap"
