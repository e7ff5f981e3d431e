from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from slidesparse.gemm.spec import FormSpec, Route, WeightSpec
from slidesparse.gemm.speed import (
    Installation,
    LayerSpeed,
    MeasuredLayer,
    SpeedTable,
    WrongForm,
    find_nearest,
    is_wrong,
)

TOKENS = (64, 1024, 16384)
LIBRARIES = {"dense": "torch 2.11", "quick": "Quick 1.0"}
QUICK: dict[str, tuple[float | None, ...]] = {"quick 6:8": (0.5,) * 3}


def _layer(out: int = 4096, columns: int = 4096, dtype: str = "int8", **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed(dtype, out, columns, TOKENS, us)


HERE = Installation("Test GPU", "9.0", "580.1", LIBRARIES)


def _table(*layers: LayerSpeed, packaged: bool = False, **there: Any) -> SpeedTable:
    return SpeedTable(replace(HERE, **there), layers, packaged)


def _find(
    tables: Sequence[SpeedTable],
    libraries: dict[str, str],
    dtype: str = "int8",
    pattern: str = "6:8",
    out: int = 4096,
    columns: int = 4096,
) -> MeasuredLayer | None:
    return find_nearest(tables, replace(HERE, libraries=libraries), dtype, pattern, out, columns)


# -- which layer speaks --------------------------------------------------------------------------------------------


def test_the_nearest_layer_speaks() -> None:
    near = _layer(4096, 8192, dense=(1.0,) * 3, **{"quick 6:8": (0.5,) * 3})
    far = _layer(8192, 2048, dense=(1.0,) * 3, **{"quick 6:8": (0.9,) * 3})
    found = _find([_table(far, near)], LIBRARIES, "int8", "6:8", 4096, 7000)
    assert (found.layer.out, found.layer.columns) == (4096, 8192)
    assert found.layer.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}
    assert _find([_table(far, near)], LIBRARIES, "int8", "6:8", 4096, 1000) is None
    assert _find([_table(far, near)], LIBRARIES, "fp8", "6:8", 4096, 8192) is None
    assert _find([_table(far, near)], LIBRARIES, "int8", "4:6", 4096, 8192) is None


def test_beyond_the_users_tokens_the_packages_times_go_on() -> None:
    users = LayerSpeed("int8", 4096, 4096, (256, 512), {"dense": (1.0, 1.0), "quick 6:8": (0.5, None)})
    packages = _layer(dense=(2.0, 3.0, 4.0), **{"quick 6:8": (1.0, 1.5, 2.0)})
    found = _find([_table(users), _table(packages, libraries={**LIBRARIES, "dense": "torch 2.10"})], LIBRARIES)
    assert found.layer.tokens == (64, 256, 512, 1024, 16384)
    prior = "prior: measured at 4096x4096 with torch 2.10; this is torch 2.11"
    assert found.describe() == f"measured here from 256 to 512 tokens; past them {prior}"
    assert found.layer.us == {"dense": (2.0, 1.0, 1.0, 3.0, 4.0), "quick": (1.0, 0.5, None, 1.5, 2.0)}
    # A backend that the package has no times of has none there.
    both = replace(users, us={**users.us, "sparse 6:8": (0.4, 0.4)})
    tables = [_table(layer, libraries=LIBRARIES | {"sparse": "Sparse 1.0"}) for layer in (both, packages)]
    found = _find(tables, LIBRARIES | {"sparse": "Sparse 1.0"})
    assert found.layer.us["sparse"] == (None, 0.4, 0.4, None, None)
    # Within them the user's count alone, as do those of more backends and of another size.
    wide = LayerSpeed("int8", 4096, 4096, (16, 32768), {"dense": (1.0, 1.0), "quick 6:8": (0.5, 0.5)})
    more = _layer(dense=(2.0,) * 3, **{"quick 6:8": (1.0,) * 3, "sparse 6:8": (1.0,) * 3})
    near = _layer(4096, 4097, dense=(2.0,) * 3, **{"quick 6:8": (1.0,) * 3})
    for mine, theirs in ((wide, packages), (users, more), (users, near)):
        libraries = LIBRARIES | {"sparse": "Sparse 1.0"}
        tables = [_table(layer, libraries=libraries) for layer in (mine, theirs)]
        found = _find(tables, libraries, "int8", "6:8", 4096, 4096)
        assert found.layer.tokens == mine.tokens


def test_times_of_another_library_are_used_where_there_are_no_better_ones_and_named() -> None:
    table = _table(_layer(dense=(1.0,) * 3, **{"quick 6:8": (0.5,) * 3, "sparse 6:8": (0.4,) * 3}))
    here = {"dense": "torch 2.12", "quick": "Quick 1.1"}
    for now, told in (
        (LIBRARIES, "measured here"),
        (LIBRARIES | {"dense": "torch 2.12"}, "prior: measured at 4096x4096 with torch 2.11; this is torch 2.12"),
        (here, "prior: measured at 4096x4096 with torch 2.11 and Quick 1.0; this is torch 2.12 and Quick 1.1"),
    ):
        found = _find([table], now, "int8", "6:8", 4096, 4096)
        assert found.layer.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}
        assert found.describe() == told
    # Dense is not asked for: the packed forms compare among themselves.
    found = _find([table], {"quick": "Quick 1.0"}, "int8", "6:8", 4096, 4096)
    assert set(found.layer.us) == {"quick"}
    assert found.others == ()


def test_times_of_the_same_libraries_go_before_nearer_ones_of_two_others() -> None:
    """Another size counts as much as one library."""
    old = _table(_layer(dense=(9.0,) * 3, **QUICK), libraries={"dense": "torch 2.10", "quick": "Quick 0.9"})
    older_kernel = _table(_layer(dense=(8.0,) * 3, **QUICK), libraries={**LIBRARIES, "quick": "Quick 0.9"})
    same = _table(_layer(4096, 8000, dense=(7.0,) * 3, **QUICK))

    def dense_time(*tables: SpeedTable) -> float | None:
        found = _find(tables, LIBRARIES, "int8", "6:8", 4096, 4096)
        return None if found is None else found.layer.us["dense"][0]

    assert dense_time(old, same) == 7.0
    assert dense_time(old, same, older_kernel) == 8.0
    assert dense_time(old, older_kernel) == 8.0
    assert dense_time(old, _table(_layer(4096, 9000, dense=(7.0,) * 3, **QUICK))) == 9.0  # beyond the reach


# -- here, or a prior ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"driver": "570.9"}, "with driver 570.9; this is driver 580.1"),
        ({"driver": None}, ""),  # unknown: whether it is this one, too
        ({"packaged": True}, ""),  # another machine's, though all is the same
        ({"libraries": {**LIBRARIES, "quick": "Quick 0.9"}}, "with Quick 0.9; this is Quick 1.0"),
        ({"gpu": "Other GPU"}, "with Other GPU; this is Test GPU"),
    ],
)
def test_what_was_not_measured_here_is_a_prior(there: dict[str, Any], told: str) -> None:
    prior = _table(_layer(dense=(2.0,) * 3, **QUICK), **there)
    found = _find([prior], LIBRARIES)
    assert found.here == ()
    assert found.describe() == f"prior: measured at 4096x4096 {told}".strip()
    here = _find([prior, _table(_layer(dense=(3.0,) * 3, **QUICK))], LIBRARIES)
    assert (here.layer.us["dense"][0], here.here, here.describe()) == (3.0, TOKENS, "measured here")


def test_an_older_table_of_this_gpu_goes_before_another_gpus() -> None:
    older = _table(_layer(dense=(2.0,) * 3, **QUICK), driver="570.9", libraries={**LIBRARIES, "dense": "torch 2.10"})
    other = _table(_layer(dense=(3.0,) * 3, **QUICK), gpu="Other GPU")
    for tables in ([older, other], [other, older]):
        found = _find(tables, LIBRARIES)
        assert found.layer.us["dense"][0] == 2.0


def test_comparisons_of_one_size_are_one_layer_and_the_newest_counts() -> None:
    older = _layer(dense=(9.0,) * 3, **{"quick 6:8": (8.0,) * 3, "quick 4:6": (7.0,) * 3})
    newer = LayerSpeed("int8", 4096, 4096, (256, 1024), {"dense": (2.0, 3.0), "quick 6:8": (1.0, 1.5)})
    found = _find([_table(older, newer)], LIBRARIES)
    assert found.layer.tokens == (64, 256, 1024, 16384)
    assert found.layer.us == {"dense": (9.0, 2.0, 3.0, 9.0), "quick": (8.0, 1.0, 1.5, 8.0)}
    other = _find([_table(older, newer)], LIBRARIES, pattern="4:6")
    assert other.layer.us == {"dense": (9.0,) * 3, "quick": (7.0,) * 3}


def test_a_form_that_could_not_run_here_is_not_brought_back_by_a_prior() -> None:
    broken = LayerSpeed("int8", 4096, 4096, (16, 1024), {"dense": (1.0, 1.0), "quick 6:8": (None, None)})
    prior = _table(_layer(dense=(2.0,) * 3, **QUICK), packaged=True)
    found = _find([_table(broken), prior], LIBRARIES)
    assert found.layer.tokens == (16, 1024, 16384)
    assert found.layer.us["quick"] == (None, None, None)


def test_a_form_that_was_wrong_elsewhere_says_nothing_here() -> None:
    blank = _layer(dense=(2.0,) * 3, **{"quick 6:8": (None,) * 3, "slow 6:8": (1.0,) * 3})
    there = replace(_table(blank, driver="570.1"), wrong=(WrongForm("int8", 4096, 4096, "quick 6:8"),))
    prior = _table(_layer(dense=(1.0,) * 3, **QUICK), packaged=True)
    assert _find([there], LIBRARIES) is None
    found = _find([there, prior], LIBRARIES)
    assert found.layer.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}


@pytest.mark.parametrize(
    ("there", "wrong"),
    [
        ({}, True),
        ({"libraries": {**LIBRARIES, "other": "Other 1.0"}}, True),  # has no part in it
        ({"driver": "590.1"}, False),
        ({"gpu": "Other GPU"}, False),
        ({"libraries": {**LIBRARIES, "dense": "torch 2.10"}}, False),  # it may have been the wrong one
        ({"packaged": True}, False),
    ],
)
def test_a_form_is_wrong_where_nothing_changed_since(there: dict[str, Any], wrong: bool) -> None:
    form = WrongForm("int8", 4096, 4096, "quick 6:8")
    table = replace(_table(**there), wrong=(form,))
    assert is_wrong([_table(), table], HERE, "quick", form) == wrong
    assert not is_wrong([table], HERE, "quick", replace(form, name="quick 4:6"))


# -- the spec of a weight ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "routes"),
    [
        (0, 3, [(0, "quick"), (4, "dense"), (16, "quick"), (64, "dense")]),
        (20, 99, [(0, "dense"), (16, "quick"), (100, "dense")]),
        (70, 80, [(0, "dense"), (16, "quick"), (64, "dense"), (70, "quick"), (81, "dense")]),
    ],
)
def test_a_spec_takes_another_route_for_a_while(first: int, last: int, routes: list[tuple[int, str]]) -> None:
    forms = FormSpec("dense", (64, 4), 3), FormSpec("quick", (), 5)
    spec = WeightSpec(96, "fp8", forms, (Route(0, "dense"), Route(16, "quick"), Route(64, "dense")))
    assert spec.through("quick", first, last).routes == tuple(Route(*route) for route in routes)
