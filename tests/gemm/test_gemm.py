from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import scaled_product

from slidesparse import InputError, Pattern, UnsupportedError, pack, prune_mask
from slidesparse.gemm import BACKENDS, Backend, Problem, choose, get_backend, select
from slidesparse.gemm.cusparselt.backend import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.reference import EXACT_BLOCK, Reference, apply_scales, product
from slidesparse.gemm.select import NO_COPY, NOT_MEASURED, WRONG_HERE, Choice, backends_to_compare, wrong_form
from slidesparse.gemm.spec import Route
from slidesparse.gemm.speed import Installation, LayerSpeed, SpeedTable
from slidesparse.weights.slide import gather

PROBLEM = Problem(Pattern(6, 8), torch.int8, 8, 16, torch.device("cpu"))


def test_int8_product_is_exact_where_float32_would_round() -> None:
    # 3 blocks of the largest product, 2^14 each: beyond 2^24, odd numbers included, float32 holds no longer.
    columns = 3 * EXACT_BLOCK + 5
    x = torch.full((2, columns), -128, dtype=torch.int8)
    weight = torch.full((3, columns), -128, dtype=torch.int8)
    x[1, 0], weight[1, 0] = 127, 127
    exact = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert exact.max() > 2**24
    assert exact[1, 1] % 2 == 1
    result = product(x, weight)
    assert result.dtype == torch.int32
    assert np.array_equal(result.numpy(), exact)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_epilogue_is_vllms(out_dtype: torch.dtype, biased: bool) -> None:
    accumulator = torch.randint(-(2**30), 2**30, (7, 12), dtype=torch.int32)
    scale_x, scale_w = torch.rand(7, 1) * 1e-4, torch.rand(12) * 1e-4
    bias = torch.randn(12, dtype=torch.bfloat16) if biased else None
    y = apply_scales(accumulator, scale_x, scale_w, bias, out_dtype)
    expected = scaled_product(
        accumulator.numpy().astype(np.int64),
        scale_x.numpy(),
        scale_w.numpy(),
        None if bias is None else bias.float().numpy(),
    )
    assert torch.equal(y, torch.from_numpy(expected).to(out_dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", ["6:8", "4:6", "dense"])
def test_every_backend_multiplies_what_it_prepared(backend: str, text: str) -> None:
    weight = torch.randint(1, 128, (9, 77), dtype=torch.int8)
    weight = weight * prune_mask(weight, text)
    packed = pack(weight, text, scale=torch.rand(9))
    chosen = get_backend(backend)
    if chosen.why_not(Problem(packed.pattern, torch.int8, 9, 77, packed.device)) is not None:
        pytest.skip("this backend cannot run on a CPU; it has tests of its own")
    x = torch.randint(-128, 128, (5, 77), dtype=torch.int8)
    lifted = gather(x, chosen.layout.column_map(packed))
    scale_x = torch.rand(5, 1)
    y = chosen.matmul(lifted, scale_x, chosen.prepare(packed), packed.scale, None, 9, torch.float32)
    exact = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert np.array_equal(y.numpy(), scaled_product(exact, scale_x.numpy(), packed.scale.numpy(), None))


# -- the choice ----------------------------------------------------------------------------------------------------


class _Fast(Reference):
    name = "fast"
    accelerated = True

    def why_not(self, problem: Problem) -> str | None:
        return "it needs a K of 32 at least" if problem.in_features < 32 else None


class _Slow(_Fast):
    name = "slow"


def _know_only(monkeypatch: pytest.MonkeyPatch, **backends: Callable[[], Backend]) -> None:
    for name in list(BACKENDS):
        monkeypatch.delitem(BACKENDS, name)
    for name, make in backends.items():
        monkeypatch.setitem(BACKENDS, name, make)


ABLE = Problem(Pattern(6, 8), torch.int8, 8, 64, torch.device("cuda"))


def _measured(monkeypatch: pytest.MonkeyPatch, **us: tuple[float | None, ...]) -> None:
    times = {name.replace("_", " ").replace("at", ":"): column for name, column in us.items()}
    layer = LayerSpeed("int8", 8, 64, (16, 256, 4096), times)
    libraries = {name: get_backend(name).library() for name in BACKENDS}
    _use_gpu(monkeypatch, "Test GPU")
    table = SpeedTable(Installation("Test GPU", "9.0", "580.1", libraries), (layer,))
    monkeypatch.setattr(select, "table_of", lambda here: table)


def _use_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select, "driver_version", lambda: "580.1")


def test_without_an_accelerated_backend_the_fallback_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense)
    assert choose(PROBLEM).routes == (Route(0, "dense"),)
    assert choose(PROBLEM, fallback="none").routes == (Route(0, "reference"),)


def test_auto_claims_no_speed_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast)
    _measured(monkeypatch, dense=(1.0, 1.0, 1.0), fast_4at6=(0.1, 0.1, 0.1))
    assert choose(ABLE).backends == ("dense",)
    assert choose(ABLE).reason == NOT_MEASURED
    assert choose(ABLE, "fast").backends == ("fast",)
    assert choose(ABLE, fallback="none").backends == ("fast",)
    choice = choose(PROBLEM, fallback="none")
    assert choice.backends == ("reference",)
    assert choice.reason == "fast: it needs a K of 32 at least"


def test_auto_switches_where_a_backend_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast, slow=_Slow)
    _measured(monkeypatch, dense=(1.0, 1.0, 1.0), fast_6at8=(1.2, 0.9, 0.5), slow_6at8=(1.3, 1.1, 0.4))
    choice = choose(ABLE, fallback="fastest")
    assert choice.routes == (Route(0, "dense"), Route(65, "fast"), Route(1025, "slow"))
    assert choice.backends == ("dense", "fast", "slow")
    assert [choice.at(m) for m in (0, 64, 65, 1024, 1025, 10**6)] == ["dense"] * 2 + ["fast"] * 2 + ["slow"] * 2
    assert choice.describe() == "dense up to 64 tokens, fast up to 1024, slow beyond"
    assert choice.times == {16: (1.0, 1.0), 256: (0.9, 1.0), 4096: (0.4, 1.0)}
    assert choice.reason == (
        "fast takes 0.50 to 1.20 of dense's time, slow takes 0.40 to 1.30 of dense's time; measured here"
    )


def test_a_dense_copy_is_kept_where_it_is_needed_and_the_reason_says_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast)
    _measured(monkeypatch, dense=(1.0, 1.0, 1.0), fast_6at8=(1.2, 0.9, 0.5))
    assert choose(ABLE).routes == (Route(0, "fast"),)
    assert choose(ABLE).reason == f"fast takes 0.50 to 1.20 of dense's time; measured here{NO_COPY}"
    assert choose(ABLE, fallback="fastest").backends == ("dense", "fast")
    assert NO_COPY not in choose(ABLE, fallback="fastest").reason
    _measured(monkeypatch, dense=(1.0, 1.0, 1.0), fast_6at8=(1.6, 0.9, 0.5))
    assert choose(ABLE) == choose(ABLE, fallback="fastest")
    assert choose(ABLE).backends == ("dense", "fast")


def test_a_form_that_failed_here_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast)
    _measured(monkeypatch, dense=(1.0, 1.0, 1.0), fast_6at8=(None, None, None))
    choice = choose(ABLE)
    assert (choice.backends, choice.reason) == (("dense",), "fast has no time; measured here")
    assert choose(ABLE, fallback="none").backends == ("reference",)


def test_unmeasured_weights_of_8_bits_run_packed_on_hopper_from_6_of_8_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _use_gpu(monkeypatch, "Test GPU")
    monkeypatch.setattr(Hopper, "why_not", lambda self, it: None if self.bits in (None, it.bits) else "bits")
    monkeypatch.setattr(CuSparseLt, "why_not", lambda *_: None)
    for pattern, dtype, bits, taken in (
        ("6:8", torch.int8, 8, "hopper"),
        ("2:4", torch.float8_e4m3fn, 8, "hopper"),
        ("6:8", torch.int8, 6, "hopper-6bit"),
        ("8:10", torch.int8, 8, "dense"),
        ("6:8", torch.bfloat16, 8, "dense"),
    ):
        choice = choose(Problem(Pattern.parse(pattern), dtype, 4608, 3584, torch.device("cuda"), bits=bits))
        assert (choice.backends, choice.reason) == ((taken,), NOT_MEASURED)


def test_weights_of_six_bits_have_a_backend_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _use_gpu(monkeypatch, "Test GPU")
    monkeypatch.setattr(Hopper, "why_not", lambda self, it: None if self.bits in (None, it.bits) else "bits")
    monkeypatch.setattr(CuSparseLt, "why_not", lambda *_: None)
    eight = Problem(Pattern(6, 8), torch.int8, 4608, 3584, torch.device("cuda"))
    six = replace(eight, bits=6)
    assert backends_to_compare(eight) == ["dense", "hopper"]
    assert backends_to_compare(six) == ["dense", "hopper-6bit"]
    assert choose(six, "hopper").backends == ("hopper",)  # as asked for
    with pytest.raises(UnsupportedError):
        choose(eight, "hopper-6bit")


def test_times_are_asked_for_where_only_they_can_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast, slow=_Slow)
    _use_gpu(monkeypatch, "Test GPU")
    assert backends_to_compare(ABLE) == backends_to_compare(ABLE, fallback="none") == ["dense", "fast", "slow"]
    for problem in (PROBLEM, replace(ABLE, slid=False), replace(ABLE, in_features=16)):
        assert backends_to_compare(problem) == []
    assert backends_to_compare(ABLE, "fast") == []
    monkeypatch.delitem(BACKENDS, "slow")
    assert backends_to_compare(ABLE) == ["dense", "fast"]
    assert backends_to_compare(ABLE, fallback="none") == []


def test_a_backend_that_yields_is_left_out_where_the_faster_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, hopper=_Fast, cusparselt=CuSparseLt)
    monkeypatch.setattr(CuSparseLt, "why_not", lambda *_: None)
    monkeypatch.setattr(_Fast, "name", "hopper")
    _use_gpu(monkeypatch, "Test GPU")
    assert backends_to_compare(ABLE) == ["dense", "hopper"]
    assert backends_to_compare(replace(ABLE, dtype=torch.bfloat16)) == ["dense", "hopper"]
    assert backends_to_compare(replace(ABLE, in_features=16)) == ["dense", "cusparselt"]
    assert choose(ABLE, "cusparselt").backends == ("cusparselt",)  # as asked for


def test_a_backend_that_was_wrong_is_not_able(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast, slow=_Slow)
    _measured(monkeypatch, dense=(1.0,) * 3, fast_6at8=(0.1,) * 3, slow_6at8=(0.5,) * 3)
    table = select.table_of(select.installation())
    wrong = replace(table, wrong=(wrong_form(ABLE, "fast"),))
    monkeypatch.setattr(select, "table_of", lambda here: wrong)
    assert choose(ABLE).backends == ("slow",)
    assert choose(ABLE, fallback="none").backends == ("slow",)
    assert backends_to_compare(ABLE) == ["dense", "slow"]
    assert backends_to_compare(ABLE, fallback="none") == []
    assert backends_to_compare(replace(ABLE, out_features=16)) == ["dense", "fast", "slow"]
    monkeypatch.setattr(_Slow, "yields_to", lambda *_: ("fast", "it is faster"))
    assert choose(ABLE).backends == ("slow",)  # nothing faster can run
    both = replace(table, wrong=(wrong_form(ABLE, "fast"), wrong_form(ABLE, "slow")))
    monkeypatch.setattr(select, "table_of", lambda here: both)
    reason = f"fast: {WRONG_HERE}; slow: {WRONG_HERE}"
    assert choose(ABLE) == Choice((Route(0, "dense"),), reason)
    assert choose(ABLE, fallback="none") == Choice((Route(0, "reference"),), reason)


def test_without_the_fallback_one_packed_form_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _know_only(monkeypatch, reference=Reference, dense=Dense, fast=_Fast, slow=_Slow)
    _measured(monkeypatch, dense=(0.1, 0.1, 0.1), fast_6at8=(2.0, 0.9, 0.5), slow_6at8=(1.3, 1.1, 0.4))
    assert choose(ABLE, fallback="none").routes == (Route(0, "slow"),)


def test_an_explicit_choice_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "fast", _Fast)
    with pytest.raises(UnsupportedError, match="it needs a K of 32 at least"):
        choose(PROBLEM, "fast")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("cutlas",), "unknown backend; got 'cutlas'"), (("auto", "maybe"), "unknown fallback; got 'maybe'")],
)
def test_unknown_names(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        choose(PROBLEM, *arguments)
    assert "dense" in str(error.value)


@pytest.mark.parametrize("backend", ["hopper", "cusparselt"])
def test_a_gpu_backend_refuses_activations_on_a_cpu(backend: str) -> None:
    x = torch.zeros(4, 128, dtype=torch.int8)
    operand = tuple(torch.zeros(1, 1, 1, 1, dtype=torch.uint8) for _ in range(2))
    with pytest.raises(InputError):
        get_backend(backend).matmul(x, None, operand, None, None, 32, torch.bfloat16)
