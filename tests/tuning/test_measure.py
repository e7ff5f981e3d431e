"""Measuring one weight on a CPU: what is timed, for how long, within what memory, and what is not believed."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from tuning_fakes import FakeStopwatch, Quick, Us, Wrong

from slidesparse.gemm import BACKENDS
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.prune import prune_mask
from slidesparse.tuning import measure
from slidesparse.tuning.measure import (
    AT_START,
    LONG_FROM,
    LONG_S,
    RIVALS_FROM,
    SHORT_S,
    LayerMeasurement,
    TakenTimes,
    _Form,
    sizes_up_to,
)
from slidesparse.weights.packed import PackedWeight, pack_segments

OUT, K = 24, 64


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Quick, Wrong):
        monkeypatch.setitem(BACKENDS, backend.name, backend)


def packed(dtype: torch.dtype = torch.int8) -> PackedWeight:
    weight = torch.randint(1, 128, (OUT, K)).to(torch.int8) * prune_mask(torch.ones(OUT, K), "6:8").to(torch.int8)
    if dtype != torch.int8:
        return pack_segments(weight.to(dtype), "6:8")
    return pack_segments(weight, "6:8", scale=torch.full((OUT,), 1e-2))


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
    assert floats.layer is not None
    assert floats.layer.dtype == "bf16"


def test_operands_are_copied_so_that_the_cache_is_cold_and_calls_are_captured() -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=1e3), l2_bytes=10 * OUT * K)
    taken(stopwatch, [16])
    assert all(capture and copies > 4 for _, _, capture, copies in stopwatch.prepared)


@pytest.mark.parametrize(("tokens", "seconds"), [(16, SHORT_S), (LONG_FROM, LONG_S)])
def test_a_backend_runs_alone_for_its_time(tokens: int, seconds: float) -> None:
    stopwatch = FakeStopwatch(by(dense=2e3, quick=1e3))
    taken(stopwatch, [tokens])
    runs = [(name, len(list(group))) for name, group in groupby(stopwatch.launches)]
    copies = stopwatch.prepared[0][3]
    in_turn = [run for run in runs if run[1] > 4]  # the others warm up and estimate
    length = {"dense": seconds / 2e-3 / copies, "quick": seconds / 1e-3 / copies}
    if tokens < LONG_FROM:  # dense before it counts, and once more for the noise, where that takes little
        assert [name for name, _ in in_turn] == ["dense", "quick", "dense"]
        assert in_turn[0][1] == pytest.approx(2 * length["dense"], abs=4)
        in_turn = in_turn[1:]
    else:
        assert [name for name, _ in in_turn] == ["dense", "quick"]
    assert all(count == pytest.approx(length[name], abs=3) for name, count in in_turn)


def test_what_else_runs_on_the_gpu_shows() -> None:
    quiet, busy = (FakeStopwatch(by(dense=1e3, quick=1e3), disturbance=by_launch) for by_launch in (1.0, 1.02))
    assert taken(quiet, [16]).noise == 0
    assert taken(busy, [16]).noise > 0.3


def test_a_wrong_product_has_no_time_and_its_reason_is_told() -> None:
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3, wrong=1.0)), [16], ("dense", "wrong", "quick"))
    assert found.layer is not None
    assert found.layer.us == {"dense": (1e3,), "wrong 6:8": (None,), "quick 6:8": (1e3,)}
    assert found.faults.keys() == {"wrong"}
    assert found.faults["wrong"].startswith("WRONG RESULT; got relative error 1")
    assert found.wrong == {"wrong"}


def test_who_is_wrong_once_has_no_time_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = Quick.matmul

    def wrong_at_64(self: Quick, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return matmul(self, x, *rest) * (2 if len(x) == 64 and self.name == "wrong" else 1)

    monkeypatch.setattr(Wrong, "matmul", wrong_at_64)
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3, wrong=1.0)), [16, 64, 256], ("dense", "wrong", "quick"))
    assert found.layer is not None
    assert found.layer.us["wrong 6:8"] == (None, None, None)
    assert found.layer.us["quick 6:8"] == (1e3, 1e3, 1e3)


def test_who_is_wrong_is_not_run_again_and_no_later_fault_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_then_broken(self: Quick, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(x) > 16:
            raise RuntimeError("no kernel image")
        return Quick.matmul(self, x, *rest) * 2

    monkeypatch.setattr(Wrong, "matmul", wrong_then_broken)
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3)), [16, 64], ("dense", "wrong", "quick"))
    assert found.faults["wrong"].startswith("WRONG RESULT")
    assert found.wrong == {"wrong"}


def test_memory_that_ends_between_numbers_of_tokens_hides_no_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = measure.gaussian

    def full(*shape: int, **kind: Any) -> torch.Tensor:
        if shape[0] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return drawn(*shape, **kind)

    monkeypatch.setattr(measure, "gaussian", full)
    found = taken(FakeStopwatch(by(dense=1e3, quick=1e3)), [16, 64], ("dense", "wrong", "quick"))
    assert found.wrong == {"wrong"}
    assert found.faults["dense"] == "out of memory at 64 tokens"


@pytest.mark.parametrize("error", [RuntimeError, ValueError])  # torch's for scales that it does not take
def test_without_a_dense_time_there_is_nothing_to_compare_with(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error("no kernel image\nmore")

    monkeypatch.setattr(Dense, "matmul", broken)
    faults = {"dense": f"{error.__name__}: no kernel image"}
    assert taken(FakeStopwatch(by(quick=1e3)), [16]) == TakenTimes(None, 0.0, faults)


def test_measuring_ends_with_its_time_and_keeps_what_it_has() -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=1e3))
    found = taken(stopwatch, [16, 64, 256], until=0.09)
    assert found.layer is not None
    assert found.layer.tokens == (16, 64)  # some 0.08 s each


def test_a_form_that_is_far_slower_is_not_timed_where_that_takes_long() -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=4e3, wrong=1.0))
    found = taken(stopwatch, [1024, RIVALS_FROM], ("dense", "quick"))
    assert found.layer is not None
    assert found.layer.us["quick 6:8"] == (4e3, 4e3)  # the only packed one
    slow = {"dense": 1e3, "quick": 1e3, "slow": 1.3e3}
    BACKENDS["slow"] = type("Slow", (Quick,), {"name": "slow"})
    try:
        found = taken(FakeStopwatch(by(**slow)), [1024, RIVALS_FROM], ("dense", "quick", "slow"))
    finally:
        del BACKENDS["slow"]
    assert found.layer is not None
    assert found.layer.us["slow 6:8"] == (1.3e3, None)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_limits_the_number_of_tokens() -> None:
    stopwatch = FakeStopwatch(by(dense=1e5, quick=1e5))
    token_bytes = 2 * K + 2 * OUT + 96 + 4  # activations, products, lifted ones (6:8: 1.5 times as many), a scale
    stopwatch.memory = 700 * token_bytes
    found = taken(stopwatch, [16, 64, 1024, 4096])
    assert found.layer is not None
    assert found.layer.tokens == (16, 64, 512)
    # There is no memory for the products of a graph besides, so these calls are launched one by one.
    assert [capture for _, tokens, capture, _ in stopwatch.prepared if tokens == 512] == [False, False]
    assert [capture for _, tokens, capture, _ in stopwatch.prepared if tokens == 16] == [True, True]
    assert taken(stopwatch, [4096], known=(1024,)).layer is None  # near enough to 512
    assert taken(FakeStopwatch(by(), memory=10), [16]).layer is None


def test_sums_that_a_backend_writes_before_its_scales_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quick, "accumulator_bytes", lambda *_: 4)
    memory = 700 * (2 * K + (2 + 4) * OUT + 96 + 4)
    found = taken(FakeStopwatch(by(dense=1e5, quick=1e5), memory=memory), [512, 1024])
    assert found.layer is not None
    assert found.layer.tokens == (512,)
    found = taken(FakeStopwatch(by(dense=1e5, quick=1e5), memory=memory * 2 // 3), [512])
    assert found.layer is not None
    assert found.layer.tokens == (256,)


def test_measuring_takes_no_more_than_its_own_limit() -> None:
    stopwatch, effort = FakeStopwatch(by(dense=1e5, quick=1e5)), replace(AT_START, n_bytes=1 << 17)
    found = LayerMeasurement(packed(), ("dense", "quick"), torch.bfloat16, stopwatch, effort).measure(
        [16, 4096], (), lambda: False
    )
    assert found.layer is not None
    assert found.layer.tokens == (16, 256)


def test_out_of_memory_all_the_same_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = FakeStopwatch(by(dense=1e3, quick=1e3))
    prepare = stopwatch.prepare

    def full(calls, capture, check):  # type: ignore[no-untyped-def]
        if len(calls[0].args[1]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(calls, capture, check)

    monkeypatch.setattr(stopwatch, "prepare", full)
    found = taken(stopwatch, [16, 64])
    assert found.layer is not None
    assert found.layer.tokens == (16,)
    assert found.faults == {"dense": "out of memory at 64 tokens"}


def test_sizes_end_with_the_engines_largest_batch() -> None:
    assert sizes_up_to(2048) == [16, 64, 256, 512, 1024, 2048]
    assert sizes_up_to(8192)[-2:] == [4096, 8192]
    assert sizes_up_to(5000)[-1] == 4096
    assert sizes_up_to(10**6) == list(measure.SIZES)
    assert sizes_up_to(8) == [8]


def test_activations_are_nobodys_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(_Form, "run", lambda form, module, x: seen.append(x) or x)
    taken(FakeStopwatch(by(dense=1.0, quick=1.0)), [16])
    for seed in range(100):  # as scripts draw them, `bench serve` among them
        drawn = torch.randn(OUT, K, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))
        assert (seen[0] * drawn[:16]).mean().abs() < 0.2
