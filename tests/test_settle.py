"""What becomes of a loaded weight or a shard of one: every reason, and the bits of the definition."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from blackwell import act_as_blackwell

from slidesparse import InputError, Pattern, PatternViolation, SlideLinear, pack, prune_mask
from slidesparse.gemm import Problem
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.layer import settle as module
from slidesparse.layer.settle import Chooser, RunsDense, RunsPacked, pack_dense, settle
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import quantize_weight
from slidesparse.weights.support import find_pattern

REFERENCE = Chooser("reference")
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def pruned(pattern: str, dtype: torch.dtype, out: int = 16, columns: int = 96) -> tuple[torch.Tensor, Any]:
    """A weight that satisfies a pattern, and its scale if it has one."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(0))
    weight *= prune_mask(weight, pattern)
    return quantize_weight(weight, dtype) if dtype.itemsize == 1 else (weight.to(dtype), None)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
@pytest.mark.parametrize("start", [0, 33, 48])
def test_a_shard_has_the_bits_of_the_definition(dtype: torch.dtype, pattern: str, start: int) -> None:
    weight, scale = pruned(pattern, dtype)
    shard, parsed = weight[:, start : start + 40], Pattern.parse(pattern)
    settled = settle(shard, scale, parsed, REFERENCE, start=start)
    assert isinstance(settled, RunsPacked)
    k_offset = start % parsed.group
    defined = pack_by(shard, pattern, scale=scale, k_offset=k_offset)
    for name in ("values", "code"):
        assert torch.equal(getattr(settled.packed, name).float(), getattr(defined, name).float())
    assert torch.equal(settled.packed.unpack().float(), shard.float())
    assert settled.choice.backends == ("reference",)
    assert settled.reason.startswith(f"{pattern}: reference for any number of tokens")
    assert (f"from position {k_offset} of a group" in settled.reason) == (k_offset > 0)


def test_a_weight_that_satisfies_nothing_is_dense() -> None:
    assert settle(torch.ones(4, 64), None, None, REFERENCE) == RunsDense("its weight satisfies no pattern", None)


def test_a_weight_that_the_checkpoint_leaves_dense_is_not_read() -> None:
    nothing = torch.empty(4, 64, device="meta")
    assert settle(nothing, None, DENSE, REFERENCE) == RunsDense("as the checkpoint says", DENSE)


@pytest.mark.parametrize(("backend", "told"), [("auto", "6:8; .*hopper: it needs a CUDA"), ("dense", "6:8; asked for")])
def test_a_weight_that_runs_dense_by_choice_is_not_packed(
    monkeypatch: pytest.MonkeyPatch, backend: str, told: str
) -> None:
    monkeypatch.setattr(module, "pack", lambda *_, **__: pytest.fail("it was packed"))
    settled = settle(*pruned("6:8", torch.int8), Pattern(6, 8), Chooser(backend))
    assert isinstance(settled, RunsDense)
    assert re.match(told, settled.reason)
    assert settled.choice.backends == ("dense",)


@pytest.mark.parametrize("backend", ["reference", "hopper", "hopper-6bit", "cusparselt"])
def test_a_backend_is_chosen_for_weights_that_are_slid_alone(backend: str) -> None:
    weight, scale = pruned("6:8", torch.int8)
    assert Chooser(backend).choose(pack(weight, DENSE, scale=scale)).backends == ("dense",)


def test_without_a_claim_the_tightest_pattern_is_found_where_the_shard_begins() -> None:
    weight, _ = pruned("4:6", torch.bfloat16)
    for start in (0, 2, 9):
        settled = settle(weight[:, start:], None, None, REFERENCE, start=start)
        assert isinstance(settled, RunsPacked)
        assert settled.packed.pattern == Pattern(4, 6)
    assert find_pattern(weight, 0, [Pattern(6, 8), DENSE]) == DENSE
    assert find_pattern(weight, 0, [Pattern(2, 4)]) is None


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_weight_that_breaks_its_claim_is_refused(dtype: torch.dtype) -> None:
    weight, scale = pruned("6:8", dtype)
    with pytest.raises(PatternViolation, match="up_proj violates 2:4 at row 0"):
        settle(weight, scale, Pattern(2, 4), Chooser(), name="up_proj")  # also where it would run dense


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_values_that_are_no_numbers_are_refused(pattern: str) -> None:
    weight, _ = pruned(pattern, torch.bfloat16)
    weight[3, weight[3].nonzero()[0]] = torch.nan
    with pytest.raises(InputError, match="up_proj holds NaN"):
        settle(weight, None, Pattern.parse(pattern), Chooser(), name="up_proj")


@pytest.mark.parametrize(
    ("backend", "fallback", "runs"),
    [("hopper-6bit", "dense", True), ("auto", "none", True), ("auto", "dense", False), ("dense", "dense", False)],
)
@pytest.mark.parametrize("pattern", [DENSE, None])
def test_a_dense_weight_of_six_bits_may_run_in_them(
    pattern: Pattern | None, backend: str, fallback: Any, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda self, problem: None if self.dense else "no form")
    weight, scale = quantize_weight(torch.randn(16, 96), torch.int8, rounding="6bit")
    settled = settle(weight, scale, pattern, Chooser(backend, fallback))
    assert isinstance(settled, RunsPacked if runs else RunsDense)
    if runs:
        assert settled.how == "dense in six bits"
        assert settled.choice.backends == ("hopper-6bit",)
        layer = SlideLinear(settled.packed, choice=settled.choice)
        assert torch.equal(layer.unpack(), weight)
        assert layer.operand_bytes["hopper-6bit"] == 256 * 128 * 3 // 4


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_dense_int8_runs_by_a_kernel_of_ours_where_servers_have_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as_blackwell(monkeypatch)
    weight, scale = quantize_weight(torch.randn(16, 96), dtype) if dtype.itemsize == 1 else (torch.ones(16, 96), None)
    settled = settle(weight, scale, DENSE, Chooser("cusparselt"))
    assert isinstance(settled, RunsPacked if dtype == torch.int8 else RunsDense)
    if isinstance(settled, RunsPacked):
        assert (settled.how, settled.choice.backends) == ("dense in eight bits", ("ampere",))
        assert torch.equal(SlideLinear(settled.packed, choice=settled.choice).unpack(), weight)


def test_a_dense_int8_weight_that_no_kernel_of_ours_runs_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    act_as_blackwell(monkeypatch, "NVRTC is too old")
    settled = settle(*quantize_weight(torch.randn(16, 96), torch.int8), DENSE, Chooser())
    assert isinstance(settled, RunsDense)
    assert settled.reason.startswith("as the checkpoint says; ")
    assert "ampere: NVRTC is too old" in settled.reason
    assert settled.choice is None


class Tuner:
    """Wants every layer, and keeps what it measured."""

    def __init__(self) -> None:
        self.measured: list[tuple[Problem, PackedWeight]] = []

    def wants(self, problem: Problem, backend: str, fallback: str) -> bool:
        return True

    def measure(self, problem: Problem, packed: PackedWeight, fallback: str) -> None:
        self.measured.append((problem, packed))


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
@pytest.mark.parametrize("bits", [6, 8])
def test_backends_are_chosen_for_what_the_packed_weight_will_be(pattern: str, bits: int) -> None:
    tuner, parsed = Tuner(), Pattern.parse(pattern)
    weight = pruned(pattern, torch.int8)[0][:, 5:]
    if bits == 6:
        weight &= ~3
    settled = settle(weight, torch.ones(16), parsed, replace(REFERENCE, tuner=tuner), start=5)
    assert isinstance(settled, RunsPacked)
    ((problem, packed),) = tuner.measured
    assert problem == Problem.of(packed)
    assert problem.bits == bits
    assert settled.packed is packed  # packed once


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_dense_layer_keeps_its_pattern_and_computes_the_same(dtype: torch.dtype) -> None:
    weight, scale = pruned("6:8", dtype)
    dense = SlideLinear(pack_dense(weight, scale, Pattern(6, 8)), backend="dense")
    slid = SlideLinear(pack(weight, "6:8", scale=scale), backend="dense")
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    assert torch.equal(dense(x), slid(x))
    assert repr(dense) == repr(slid)
    assert slid.refill(dense.pack(weight, scale))
    state = dense.state_dict()
    state["weight"] = torch.ones_like(state["weight"].float()).to(dtype)
    with pytest.raises(RuntimeError, match="weight violates 6:8"):
        dense.load_state_dict(state)
