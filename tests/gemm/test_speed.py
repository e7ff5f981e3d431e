"""Measured times: which of a table are of a layer."""

from __future__ import annotations

from slidesparse.gemm.speed import Experts, Installation, LayerSpeed, SpeedTable, find_times

TOKENS = (64, 1024, 16384)
QUICK: dict[str, tuple[float | None, ...]] = {"quick 6:8": (0.5,) * 3}
NAMES = ("dense", "quick")
HERE = Installation("Test GPU", "9.0", "580.1", {"dense": "torch 2.11", "quick": "Quick 1.0"})


def _layer(out: int = 4096, columns: int = 4096, **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed("int8", out, columns, TOKENS, us)


def test_times_are_of_the_same_kind_of_layer_alone() -> None:
    table = SpeedTable(HERE, (_layer(dense=(1.0,) * 3, **QUICK), _layer(64, dense=(2.0,) * 3, **QUICK)))
    found = find_times(table, NAMES, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert found.us == {"dense": (1.0,) * 3, "quick": (0.5,) * 3}
    for kind in (("fp8", "6:8", 4096, 4096), ("int8", "4:6", 4096, 4096), ("int8", "6:8", 4096, 4097)):
        assert find_times(table, NAMES, *kind) is None
    assert find_times(table, NAMES, "int8", "6:8", 4096, 4096, Experts(8, 8, 2)) is None


def test_packed_forms_compare_with_dense_or_among_themselves() -> None:
    alone = SpeedTable(HERE, (_layer(**QUICK),))
    assert find_times(alone, NAMES, "int8", "6:8", 4096, 4096) is None
    assert find_times(alone, ("quick",), "int8", "6:8", 4096, 4096) == _layer(quick=(0.5,) * 3)
    assert find_times(SpeedTable(HERE, (_layer(dense=(1.0,) * 3),)), NAMES, "int8", "6:8", 4096, 4096) is None


def test_comparisons_of_one_size_are_one_layer_and_the_newest_counts() -> None:
    older = _layer(dense=(9.0,) * 3, **{"quick 6:8": (8.0,) * 3, "quick 4:6": (7.0,) * 3})
    newer = LayerSpeed("int8", 4096, 4096, (256, 1024), {"dense": (2.0, 3.0), "quick 6:8": (1.0, 1.5)})
    table = SpeedTable(HERE, (older, newer))
    found = find_times(table, NAMES, "int8", "6:8", 4096, 4096)
    assert found is not None
    assert found.tokens == (64, 256, 1024, 16384)
    assert found.us == {"dense": (9.0, 2.0, 3.0, 9.0), "quick": (8.0, 1.0, 1.5, 8.0)}
    assert find_times(table, (*NAMES, "quick-6bit"), "int8", "6:8", 4096, 4096) is None  # of eight bits
    other = find_times(table, NAMES, "int8", "4:6", 4096, 4096)
    assert other is not None
    assert other.us == {"dense": (9.0,) * 3, "quick": (7.0,) * 3}
