"""Measuring one weight on a CPU: what is timed, for how long, within what memory, and what is not believed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tuning_fakes import FakeStopwatch, Quick, Us, Wrong

from slidesparse.gemm import BACKENDS
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.pruning import prune_mask
from slidesparse.tuning.measure import LayerMeasurement, TakenTimes
from slidesparse.weights.packed import PackedWeight, pack_by

OUT, K = 24, 64


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Quick, Wrong):
        monkeypatch.setitem(BACKENDS, backend.name, backend)


def packed(dtype: torch.dtype = torch.int8) -> PackedWeight:
    weight = torch.randint(1, 128, (OUT, K)).to(torch.int8) * prune_mask(torch.ones(OUT, K), "6:8").to(torch.int8)
    if dtype != torch.int8:
        return pack_by(weight.to(dtype), "6:8")
    return pack_by(weight, "6:8", scale=torch.full((OUT,), 1e-2))


def taken(
    stopwatch: FakeStopwatch,
    tokens: list[int],
    names: tuple[str, ...] = ("dense", "quick"),
    known: tuple[int, ...] = (),
    weight: PackedWeight | None = None,
    until: float = 1e9,
) -> TakenTimes:
    chosen = packed() if weight is None else weight
    measurement = LayerMeasurement(chosen, names, torch.bfloat16, stopwatch)
    return measurement.measure(tokens, known, lambda: stopwatch.clock() >= until)


def by(**us: float) -> Us:
    return lambda backend, tokens: us[backend]


def test_every_backend_is_timed_at_every_number_of_tokens() -> None:
    times = {("dense", 16): 2000.0, ("dense", 64): 3000.0, ("quick", 16): 1000.0, ("quick", 64): 1500.004}
    stopwatch = FakeStopwatch(lambda backend, tokens: times[backend, tokens])
    found = taken(stopwatch, [16, 64])
    assert found == TakenTimes(
        LayerSpeed("int8", OUT, K, (16, 64), {"dense": (2000.0, 3000.0), "quick 6:8": (1000.0, 1500.0)}), 0.0, {}
    )
    floats = taken(stopwatch, [16], weight=packed(torch.bfloat16))
    assert floats.layer.dtype == "bf16"


def test_operands_are_copied_so_that_the_cache_is_cold_and_calls_are_captured() -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=1e3), l2_bytes=10 * OUT * K)
    taken(stopwatch, [16])
    assert all(capture and copies > 4 for _, _, capture, copies in stopwatch.prepared)


def test_a_wrong_product_has_no_time_and_its_reason_is_told() -> None:
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3, wrong=1.0)), [16], ("dense", "wrong", "quick"))
    assert found.layer.us == {"dense": (1e3,), "wrong 6:8": (None,), "quick 6:8": (1e3,)}
    assert found.faults.keys() == {"wrong"}
    assert found.faults["wrong"].startswith("WRONG RESULT; got relative error 1")
    assert found.wrong == {"wrong"}


def test_who_is_wrong_is_not_run_again_and_no_later_fault_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_then_broken(self: Quick, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(x) > 16:
            raise RuntimeError("no kernel image")
        return Quick.matmul(self, x, *rest) * 2

    monkeypatch.setattr(Wrong, "matmul", wrong_then_broken)
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3)), [16, 64], ("dense", "wrong", "quick"))
    assert found.faults["wrong"].startswith("WRONG RESULT")
    assert found.wrong == {"wrong"}


@pytest.mark.parametrize("error", [RuntimeError, ValueError])  # torch's for scales that it does not take
def test_without_a_dense_time_there_is_nothing_to_compare_with(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error("no kernel image\nmore")

    monkeypatch.setattr(Dense, "matmul", broken)
    faults = {"dense": f"{error.__name__}: no kernel image"}
    assert taken(FakeStopwatch(by(quick=1e3)), [16]) == TakenTimes(None, 0.0, faults)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_limits_the_number_of_tokens() -> None:
    stopwatch = FakeStopwatch(by(dense=1e5, quick=1e5))
    token_bytes = 2 * K + 2 * OUT + 96 + 4  # activations, products, lifted ones (6:8: 1.5 times as many), a scale
    stopwatch.memory = 700 * token_bytes
    found = taken(stopwatch, [16, 64, 1024, 4096])
    assert found.layer.tokens == (16, 64, 512)
    # There is no memory for the products of a graph besides, so these calls are launched one by one.
    assert [capture for _, tokens, capture, _ in stopwatch.prepared if tokens == 512] == [False, False]
    assert [capture for _, tokens, capture, _ in stopwatch.prepared if tokens == 16] == [True, True]
    assert taken(stopwatch, [4096], known=(1024,)).layer is None  # near enough to 512
    assert taken(FakeStopwatch(by(), memory=10), [16]).layer is None


def test_out_of_memory_all_the_same_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=1e3))
    prepare = stopwatch.prepare

    def full(calls, capture, check):  # type: ignore[no-untyped-def]
        if len(calls[0].args[1]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(calls, capture, check)

    monkeypatch.setattr(stopwatch, "prepare", full)
    found = taken(stopwatch, [16, 64])
    assert found.layer.tokens == (16,)
    assert found.faults == {"dense": "out of memory at 64 tokens"}
