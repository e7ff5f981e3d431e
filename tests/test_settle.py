"""What becomes of a loaded weight or a shard of one: every reason, and the bits of the definition."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from slidesparse import InputError, Pattern, PatternViolation, SlideLinear, UnsupportedError, pack, prune_mask
from slidesparse.gemm import Problem
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.layer import settle as module
from slidesparse.layer.settle import Chooser, RunsDense, RunsSparse, pack_dense, packed_problem, settle
from slidesparse.weights.packed import PackedWeight, pack_segments
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import quantize_weight
from slidesparse.weights.support import find_pattern, following_groups

REFERENCE = Chooser("reference")
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def pruned(pattern: str, dtype: torch.dtype, out: int = 16, columns: int = 96) -> tuple[torch.Tensor, Any]:
    """A weight that satisfies a pattern, and its scale if it has one."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(0))
    weight *= prune_mask(weight, pattern)
    return quantize_weight(weight, dtype) if dtype.itemsize == 1 else (weight.to(dtype), None)


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "4:6@50%"])
@pytest.mark.parametrize("start", [0, 33, 48])
def test_a_shard_has_the_bits_of_the_definition(dtype: torch.dtype, pattern: str, start: int) -> None:
    weight, scale = pruned(pattern, dtype)
    shard, parsed = weight[:, start : start + 40], Pattern.parse(pattern)
    settled = settle(shard, scale, parsed, REFERENCE, start=start)
    assert isinstance(settled, RunsSparse)
    k_offset = start % parsed.group
    groups = following_groups(shard, parsed, k_offset)
    defined = pack_segments(shard, pattern, scale=scale, k_offset=k_offset, groups=groups)
    for own, wanted in zip(settled.packed.segments, defined.segments, strict=True):
        assert own.kind == wanted.kind
        for name in ("groups", "values", "code"):
            one, other = getattr(own, name), getattr(wanted, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.float(), other.float())
    assert torch.equal(settled.packed.unpack().float(), shard.float())
    assert settled.choice.backends == ("reference",)
    assert settled.reason.startswith(f"{pattern}: reference for any number of tokens")
    assert (f"from position {k_offset} of a group" in settled.reason) == (k_offset > 0)


def test_a_weight_that_satisfies_nothing_is_dense() -> None:
    assert settle(torch.ones(4, 64), None, None, REFERENCE) == RunsDense("its weight satisfies no pattern", None)


def test_a_weight_that_the_checkpoint_leaves_dense_is_not_read() -> None:
    nothing = torch.empty(4, 64, device="meta")
    assert settle(nothing, None, DENSE, REFERENCE) == RunsDense("as the checkpoint says", DENSE)


def test_a_shard_without_a_group_to_slide_is_dense() -> None:
    partial = Pattern.parse("6:8@50%")
    told = "no column group of this shard follows 6:8@50%"
    assert settle(torch.ones(4, 64), None, partial, REFERENCE, start=64) == RunsDense(told, partial)


@pytest.mark.parametrize(("backend", "told"), [("auto", "6:8; .*hopper: it needs a CUDA"), ("dense", "6:8; asked for")])
def test_a_weight_that_runs_dense_by_choice_is_not_packed(
    monkeypatch: pytest.MonkeyPatch, backend: str, told: str
) -> None:
    monkeypatch.setattr(module, "pack", lambda *_, **__: pytest.fail("it was packed"))
    settled = settle(*pruned("6:8", torch.int8), Pattern(6, 8), Chooser(backend))
    assert isinstance(settled, RunsDense)
    assert re.match(told, settled.reason)
    assert settled.choice.backends == ("dense",)


def test_without_a_claim_the_tightest_pattern_is_found_where_the_shard_begins() -> None:
    weight, _ = pruned("4:6", torch.bfloat16)
    for start in (0, 2, 9):
        settled = settle(weight[:, start:], None, None, REFERENCE, start=start)
        assert isinstance(settled, RunsSparse)
        assert settled.packed.pattern == Pattern(4, 6)
    assert find_pattern(weight, 0, [Pattern(6, 8), DENSE]) == DENSE
    assert find_pattern(weight, 0, [Pattern(2, 4)]) is None


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_a_weight_that_breaks_its_claim_is_refused(dtype: torch.dtype) -> None:
    weight, scale = pruned("6:8", dtype)
    with pytest.raises(PatternViolation, match="up_proj violates 2:4 at row 0"):
        settle(weight, scale, Pattern(2, 4), Chooser(), name="up_proj")  # also where it would run dense


@pytest.mark.parametrize("pattern", ["6:8", "4:6@50%"])
def test_values_that_are_no_numbers_are_refused(pattern: str) -> None:
    weight, _ = pruned(pattern, torch.bfloat16)
    weight[3, weight[3].nonzero()[0]] = torch.nan
    with pytest.raises(InputError, match="up_proj holds NaN"):
        settle(weight, None, Pattern.parse(pattern), Chooser(), name="up_proj")


def test_only_a_whole_weight_must_have_the_share_of_its_pattern() -> None:
    weight, _ = pruned("4:6@50%", torch.bfloat16)
    claimed = Pattern.parse("4:6@75%")
    assert isinstance(settle(weight, None, claimed, REFERENCE), RunsSparse)
    with pytest.raises(InputError, match=r"violates 4:6@75%; got 8 of 16 column groups"):
        settle(weight, None, claimed, REFERENCE, whole=True)


def test_a_backend_that_cannot_run_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"hopper-6bit .* more than 6 bits"):
        settle(*pruned("6:8", torch.int8), Pattern(6, 8), Chooser("hopper-6bit"))


class Tuner:
    """Wants every layer, and keeps what it measured."""

    def __init__(self) -> None:
        self.measured: list[tuple[Problem, PackedWeight]] = []

    def wants(self, problem: Problem, backend: str, fallback: str) -> bool:
        return True

    def measure(self, problem: Problem, packed: PackedWeight, fallback: str) -> None:
        self.measured.append((problem, packed))


@pytest.mark.parametrize("pattern", ["6:8", "4:6@50%"])
@pytest.mark.parametrize("narrow", ["all", "slid", "none"])
def test_backends_are_chosen_for_what_the_packed_weight_will_be(pattern: str, narrow: str) -> None:
    """Its bits are those of the groups that are slid."""
    tuner, parsed = Tuner(), Pattern.parse(pattern)
    weight = pruned(pattern, torch.int8)[0][:, 5:]
    groups = (torch.arange(weight.shape[1]) + 5) // parsed.group
    slid = torch.isin(groups, following_groups(weight, parsed, 5 % parsed.group))
    weight[:, torch.ones_like(slid) if narrow == "all" else slid & (narrow == "slid")] &= ~3
    settled = settle(weight, torch.ones(16), parsed, replace(REFERENCE, tuner=tuner), start=5)
    assert isinstance(settled, RunsSparse)
    ((problem, packed),) = tuner.measured
    assert problem == packed_problem(packed)
    assert problem.bits == (8 if narrow == "none" else 6)
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
