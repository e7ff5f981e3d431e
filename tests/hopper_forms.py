"""The Hopper backend and its experts with one form of 2:4 weights, whatever they would choose themselves."""

from __future__ import annotations

from dataclasses import replace

import torch

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.steps import METADATA, StepForm, bundle_bytes
from slidesparse.lifting.layout import BUNDLE
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import COUNTED


def _always(packed: PackedWeight) -> int:
    return BUNDLE


class Bundles(Hopper):
    """With counts in bundles, however much they pad."""

    layout = replace(Hopper.layout, bundle=_always)

    def form_of(self, steps: torch.Tensor) -> StepForm:
        windows = next(each for each in COUNTED if bundle_bytes(each, self.value_bits) == steps.shape[2])
        return StepForm(steps.shape[1] * windows, windows, self.value_bits)


class SixBitBundles(Bundles):
    """The same with values of six bits."""

    value_bits = 6


class ExpertsWithoutBundles(HopperExperts):
    """With metadata step by step."""

    layout = METADATA
