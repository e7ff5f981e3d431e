from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slidesparse import InputError
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.spec import FormSpec, Route, WeightSpec, describe_routes, parse_weight
from slidesparse.gemm.speed import (
    DENSE,
    MARGIN,
    PACKAGED,
    LayerSpeed,
    SpeedTable,
    add_layers,
    fastest,
    file_name,
    find_nearest,
    load_speeds,
    switching,
    tables_for,
    tuned_path,
)

TOKENS = (64, 1024, 16384)
LIBRARIES = {"dense": "torch 2.11", "quick": "Quick 1.0"}
QUICK: dict[str, tuple[float | None, ...]] = {"quick 6:8": (0.5,) * 3}


def _layer(out: int = 4096, columns: int = 4096, dtype: str = "int8", **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed(dtype, out, columns, TOKENS, us)


def _table(*layers: LayerSpeed) -> SpeedTable:
    return SpeedTable("Test GPU", LIBRARIES, layers)


# -- routes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "routes"),
    [
        ((1.0, 1.0, 1.0), [(0, "dense")]),
        ((0.5, 0.5, 0.5), [(0, "quick")]),
        ((1.5, 1.5, 0.5), [(0, "dense"), (16384, "quick")]),
        ((1.5, 0.5, 0.5), [(0, "dense"), (1024, "quick")]),
        ((0.5, 0.5, 1.5), [(0, "quick"), (1025, "dense")]),
        # Faster at one M alone: nothing is known of what lies beside it.
        ((1.5, 0.5, 1.5), [(0, "dense")]),
        ((0.5, 1.5, 0.5), [(0, "quick"), (65, "dense"), (16384, "quick")]),
        # Not faster by the margin, or without a time.
        ((0.5, 0.5, (1 + MARGIN) / 2), [(0, "quick"), (1025, "dense")]),
        ((0.5, None, 0.5), [(0, "quick"), (65, "dense"), (16384, "quick")]),
    ],
)
def test_a_range_needs_both_of_its_ends(times: tuple[float | None, ...], routes: list[tuple[int, str]]) -> None:
    assert switching(_layer(dense=(1.0, 1.0, 1.0), quick=times)) == tuple(Route(*route) for route in routes)


def test_without_a_dense_time_dense_is_not_beaten() -> None:
    assert switching(_layer(dense=(None, 1.0, 1.0), quick=(0.5, 0.5, 0.5))) == (Route(0, "dense"), Route(1024, "quick"))


def test_the_fastest_over_all_token_counts() -> None:
    layer = _layer(dense=(0.1, 0.1, 0.1), quick=(1.0, 8.0, 1.0), other=(2.0, 2.0, 2.1), gap=(0.1, None, 0.1))
    assert fastest(layer) == "quick"
    assert fastest(_layer(dense=(1.0, 1.0, 1.0))) is None


# -- which layer speaks --------------------------------------------------------------------------------------------


def test_times_of_a_layer_by_name_and_of_another_size() -> None:
    layer = _layer(dense=(8.0, 16.0, 32.0), quick=(None, 4.0, 8.0))
    assert [layer.at("quick", m) for m in TOKENS] == [None, 4.0, 8.0]
    assert layer.at("absent", TOKENS[0]) is None
    other = layer.of_size(2048, 2048)
    assert (other.out, other.columns) == (2048, 2048)
    assert other.us == {"dense": (2.0, 4.0, 8.0), "quick": (None, 1.0, 2.0)}


def test_the_nearest_layer_speaks() -> None:
    near = _layer(4096, 8192, dense=(1.0,) * 3, **{"quick 6:8": (0.5,) * 3})
    far = _layer(8192, 2048, dense=(1.0,) * 3, **{"quick 6:8": (0.9,) * 3})
    found = find_nearest([_table(far, near)], LIBRARIES, "int8", "6:8", 4096, 7000)
    assert found is not None
    assert (found.layer.out, found.layer.columns) == (4096, 8192)
    assert found.layer.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}
    assert find_nearest([_table(far, near)], LIBRARIES, "int8", "6:8", 4096, 1000) is None
    assert find_nearest([_table(far, near)], LIBRARIES, "fp8", "6:8", 4096, 8192) is None
    assert find_nearest([_table(far, near)], LIBRARIES, "int8", "4:6", 4096, 8192) is None


def test_the_users_table_counts_before_the_packages() -> None:
    users = _layer(dense=(1.0,) * 3, **{"quick 6:8": (0.5,) * 3})
    packages = _layer(dense=(2.0,) * 3, **{"quick 6:8": (9.9,) * 3})
    found = find_nearest([_table(users), _table(packages)], LIBRARIES, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert found.layer.us["quick"] == (0.5,) * 3


def test_beyond_the_users_tokens_the_packages_times_go_on() -> None:
    users = LayerSpeed("int8", 4096, 4096, (256, 512), {"dense": (1.0, 1.0), "quick 6:8": (0.5, None)})
    packages = _layer(dense=(2.0, 3.0, 4.0), **{"quick 6:8": (1.0, 1.5, 2.0)})
    found = find_nearest([_table(users), _table(packages)], LIBRARIES, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert found.layer.tokens == (64, 256, 512, 1024, 16384)
    assert found.layer.us == {"dense": (2.0, 1.0, 1.0, 3.0, 4.0), "quick": (1.0, 0.5, None, 1.5, 2.0)}
    # Within them the user's count alone, as do those of other backends and of another size.
    wide = LayerSpeed("int8", 4096, 4096, (16, 32768), {"dense": (1.0, 1.0), "quick 6:8": (0.5, 0.5)})
    more = _layer(dense=(2.0,) * 3, **{"quick 6:8": (1.0,) * 3, "sparse 6:8": (1.0,) * 3})
    near = _layer(4096, 4097, dense=(2.0,) * 3, **{"quick 6:8": (1.0,) * 3})
    for mine, theirs in ((wide, packages), (users, more), (users, near)):
        libraries = LIBRARIES | {"sparse": "Sparse 1.0"}
        tables = [SpeedTable("Test GPU", libraries, (layer,)) for layer in (mine, theirs)]
        found = find_nearest(tables, libraries, "int8", "6:8", 4096, 4096)
        assert found is not None
        assert found.layer.tokens == mine.tokens


def test_times_of_another_library_are_used_where_there_are_no_better_ones_and_named() -> None:
    table = _table(_layer(dense=(1.0,) * 3, **{"quick 6:8": (0.5,) * 3, "sparse 6:8": (0.4,) * 3}))
    here = {"dense": "torch 2.12", "quick": "Quick 1.1"}
    for now, told in (
        (LIBRARIES, "measured at 4096x4096"),
        (LIBRARIES | {"dense": "torch 2.12"}, "measured at 4096x4096 with torch 2.11; this is torch 2.12"),
        (here, "measured at 4096x4096 with torch 2.11 and Quick 1.0; this is torch 2.12 and Quick 1.1"),
    ):
        found = find_nearest([table], now, "int8", "6:8", 4096, 4096)
        assert found is not None
        assert found.layer.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}
        assert found.describe() == told
    # Dense is not asked for: the packed forms compare among themselves.
    found = find_nearest([table], {"quick": "Quick 1.0"}, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert set(found.layer.us) == {"quick"}
    assert found.others == ()


def test_times_of_the_same_libraries_go_before_nearer_ones_of_others() -> None:
    old = SpeedTable("Test GPU", {"dense": "torch 2.10", "quick": "Quick 0.9"}, (_layer(dense=(9.0,) * 3, **QUICK),))
    older_kernel = SpeedTable("Test GPU", {**LIBRARIES, "quick": "Quick 0.9"}, (_layer(dense=(8.0,) * 3, **QUICK),))
    same = _table(_layer(4096, 8000, dense=(7.0,) * 3, **QUICK))

    def dense_time(*tables: SpeedTable) -> float | None:
        found = find_nearest(tables, LIBRARIES, "int8", "6:8", 4096, 4096)
        return None if found is None else found.layer.us["dense"][0]

    assert dense_time(old, older_kernel, same) == 7.0
    assert dense_time(old, older_kernel) == 8.0
    assert dense_time(old, _table(_layer(4096, 9000, dense=(7.0,) * 3, **QUICK))) == 9.0  # beyond the reach


def test_where_the_users_tokens_end_times_of_another_library_go_on_and_are_named() -> None:
    users = LayerSpeed("int8", 4096, 4096, (256,), {"dense": (1.0,), "quick 6:8": (0.5,)})
    packaged = SpeedTable("Test GPU", {**LIBRARIES, "dense": "torch 2.10"}, (_layer(dense=(2.0,) * 3, **QUICK),))
    found = find_nearest([_table(users), packaged], LIBRARIES, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert found.layer.tokens == (64, 256, 1024, 16384)
    assert found.describe() == "measured at 4096x4096 with torch 2.10; this is torch 2.11"


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    layer = _layer(dense=(1.0, 2.5, 3.0), **{"quick 6:8": (0.5, None, 0.25)})
    assert load_speeds(path) is None
    written = add_layers(path, "Test GPU", LIBRARIES, [layer])
    assert load_speeds(path) == written == _table(layer)
    other, again = _layer(8, dense=(1.0,) * 3), _layer(dense=(7.0,) * 3)
    assert add_layers(path, "Test GPU", LIBRARIES, [other, again]).layers == (other, again)
    # One table, one set of libraries: what older ones took is not compared with the new.
    newer = {**LIBRARIES, "quick": "Quick 2.0"}
    assert add_layers(path, "Test GPU", newer, [other]).layers == (other,)
    assert load_speeds(path) == SpeedTable("Test GPU", newer, (other,))


def test_tables_are_found_by_the_name_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables_for("Test GPU") == []
    add_layers(tuned_path("Test GPU"), "Test GPU", LIBRARIES, [_layer(dense=(1.0,) * 3)])
    assert [table.gpu for table in tables_for("Test GPU")] == ["Test GPU"]
    assert tables_for("Test-GPU") == []  # the file has the same name, and says whose it is


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_the_packages_tables_are_in_order(path: Path) -> None:
    table = load_speeds(path)
    assert table is not None
    assert path.name == file_name(table.gpu)
    assert DENSE in table.libraries
    for layer in table.layers:
        assert {name.partition(" ")[0] for name in layer.us} <= set(table.libraries)


GOOD = {
    "version": 1,
    "gpu": "Test GPU",
    "libraries": {},
    "layers": [{"dtype": "int8", "out": 8, "columns": 8, "tokens": [1, 2], "us": {"dense": [1.0, None]}}],
}


def test_the_good_table_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD))
    assert load_speeds(path) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version of the table"),
        ({"gpu": 7}, "table.gpu"),
        ({"libraries": {"dense": 1}}, "libraries"),
        ({"layers": [{**GOOD["layers"][0], "tokens": [2, 1]}]}, "ascending"),
        ({"layers": [{**GOOD["layers"][0], "tokens": []}]}, "sizes"),
        ({"layers": [{**GOOD["layers"][0], "out": 0}]}, "sizes"),
        ({"layers": [{**GOOD["layers"][0], "us": {"dense": [1.0]}}]}, "times of dense"),
        ({"layers": [{**GOOD["layers"][0], "us": {"dense": [1.0, 0.0]}}]}, "times of dense"),
        ({"layers": [{**GOOD["layers"][0], "ms": 1}]}, "'ms'"),
    ],
)
def test_a_damaged_table_is_one_clear_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InputError, match=r"damaged .*bad\.json") as error:
        load_speeds(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# -- the spec of a weight ------------------------------------------------------------------------------------------


def test_a_spec_picks_the_form_and_its_tensors() -> None:
    forms = FormSpec("dense", (64, 4), 3), FormSpec("quick", (), 5)
    spec = WeightSpec(96, "fp8", forms, (Route(0, "dense"), Route(16, "quick"), Route(64, "dense")))
    assert parse_weight(spec.text) == spec
    assert spec.weight_dtype == torch.float8_e4m3fn
    picked = [spec.pick(tokens) for tokens in (0, 15, 16, 63, 64, 10**9)]
    assert picked == [(forms[0], 0), (forms[0], 0), (forms[1], 3), (forms[1], 3), (forms[0], 0), (forms[0], 0)]


@pytest.mark.parametrize(
    ("first", "last", "routes"),
    [
        (0, 3, [(0, "quick"), (4, "dense"), (16, "quick"), (64, "dense")]),
        (16, 63, [(0, "dense"), (16, "quick"), (64, "dense")]),
        (20, 99, [(0, "dense"), (16, "quick"), (100, "dense")]),
        (8, 15, [(0, "dense"), (8, "quick"), (64, "dense")]),
        (70, 80, [(0, "dense"), (16, "quick"), (64, "dense"), (70, "quick"), (81, "dense")]),
    ],
)
def test_a_spec_takes_another_route_for_a_while(first: int, last: int, routes: list[tuple[int, str]]) -> None:
    forms = FormSpec("dense", (64, 4), 3), FormSpec("quick", (), 5)
    spec = WeightSpec(96, "fp8", forms, (Route(0, "dense"), Route(16, "quick"), Route(64, "dense")))
    assert spec.through("quick", first, last).routes == tuple(Route(*route) for route in routes)


def test_one_route_is_described_without_a_limit() -> None:
    assert describe_routes((Route(0, "dense"),)) == "dense for any number of tokens"


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_packaged_times_are_of_the_kernel_in_the_package(path: Path) -> None:
    table = load_speeds(path)
    assert table is not None
    assert dict(table.libraries)["hopper"] == Hopper().library()  # else every log would name an older kernel
