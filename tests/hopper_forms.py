"""The Hopper backend and its experts with one form of 2:4 weights, whatever they would choose themselves."""

from __future__ import annotations

from dataclasses import replace

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.weights import METADATA
from slidesparse.lifting.layout import BUNDLE
from slidesparse.weights.packed import PackedWeight


def _always(packed: PackedWeight) -> int:
    return BUNDLE if any(segment.kind == "2:4" for segment in packed.segments) else 1


class Bundles(Hopper):
    """With counts in bundles, however much they pad."""

    layout = replace(Hopper.layout, bundle=_always)


class SixBitBundles(Bundles):
    """The same with values of six bits."""

    width = 6


class ExpertsWithoutBundles(HopperExperts):
    """With metadata step by step."""

    layout = METADATA
