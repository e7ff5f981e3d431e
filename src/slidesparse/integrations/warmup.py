"""Warm-up of layers at load, with batches of many sizes, so that little is compiled while users wait.

The server itself runs the largest batch, and those that it captures in CUDA graphs. For batches between them a backend
may have other tiles or plans, and the first such batch would make a user wait. All tiles of our own kernels are
loaded. The norm or activation joined with a layer is known when its graph is compiled, so the lifting kernels of joined
layers run then.

The server holds all dense weights when the first layer is packed, so the warm-up must not take much memory: batches end
where the activations of a layer would take more than :data:`MEMORY_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import WeightSpec
from slidesparse.layer.experts import SlideExperts
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.layout import LiftSpec
from slidesparse.lifting.prologue import ADDING, NORMS, Prologue

MEMORY_BYTES = 256 << 20
"""Most bytes of activations in one warm-up call. The lifting kernels have one variant for all batches from 513 tokens
on, and our tiles are loaded without a run, so only cuSPARSELt's plans for larger batches come later."""

LIFTED = 2
"""Packed columns for an input column, at most: a 2:4 group of 4 for every 2 columns."""


def list_batches(most: int, starts: Iterable[int]) -> list[int]:
    """Return numbers of tokens up to ``most``: two an octave, and those where a layer changes its backend.

    >>> list_batches(10, [0, 5])
    [1, 2, 3, 4, 5, 6, 8, 10]
    """
    octaves = [m << k for k in range(most.bit_length()) for m in (1, 3)]
    return sorted({m for m in (*octaves, *starts, most) if 0 < m <= most})


@dataclass
class WarmUp:
    """Runs one layer of each kind of a model, and one lifting kernel of each kind.

    Attributes:
        most: Tokens of the largest batch.
        dtype: Type of the activations.
        memory: Most bytes of activations in one call.

    A kind is done when it has run: after an error the next layer of the kind tries again.
    """

    most: int
    dtype: torch.dtype
    memory: int = MEMORY_BYTES
    _done: set[object] = field(default_factory=set)

    def layer(self, layer: SlideLinear) -> None:
        """Run a loaded layer, if none of its kind has run."""
        forms = tuple(form.spec() for form in layer.forms)
        kind = layer.in_features, layer.out_features, layer.weight_dtype, forms, layer.choice.routes
        if kind in self._done:
            return
        device = layer.forms[0].tensors[0].device
        for form in forms:
            get_backend(form.backend).warm_up(layer.weight_dtype, self.dtype, device, form.dense)
        values, lifted = layer.in_features + layer.out_features, LIFTED * layer.in_features
        most = self.limit_tokens(values * self.dtype.itemsize + lifted * layer.weight_dtype.itemsize)
        x = torch.zeros(most, layer.in_features, dtype=self.dtype, device=device)
        for tokens in list_batches(most, (route.from_tokens for route in layer.choice.routes)):
            layer(x[:tokens])
        self._done.add(kind)

    def experts(self, layer: SlideExperts, kind: object, top_k: int) -> None:
        """Run the loaded experts of a layer, ``top_k`` for each token, if none of their kind have run.

        ``kind`` and the forms of their weights identify their kernels.
        """
        operands = [linear.weights for linear in (layer.gate_up, layer.down)]
        of_form = kind, *(operand.weights.shape for operand in operands)  # one alone may have values of six bits
        if of_form in self._done:
            return
        layer.product.warm_up(layer.gate_up.dtype, self.dtype, operands)
        layer.warm_up(self.dtype, top_k)
        self._done.add(of_form)

    def lift(self, prologue: str, weight: WeightSpec, device: torch.device) -> None:
        """Run the lifting kernels of a weight after a norm or an activation on a GPU, if none of its kind has run."""
        kind = prologue, weight.text
        if prologue == "none" or device.type != "cuda" or kind in self._done:
            return
        for form in weight.forms:
            if form.order:  # else the torch definition lifts
                rest = form.order, get_backend(form.backend).layout, weight.activation_rounding
                spec = LiftSpec(cast("Prologue", prologue), self.dtype, weight.weight_dtype, *rest)
                self._lift_batches(spec, weight, form.backend, device)
        self._done.add(kind)

    def limit_tokens(self, token_bytes: int) -> int:
        """Return the tokens of the largest batch, or as many as fit into the memory."""
        return max(1, min(self.most, self.memory // token_bytes))

    def _lift_batches(self, spec: LiftSpec, weight: WeightSpec, backend: str, device: torch.device) -> None:
        from slidesparse.lifting.kernel import find_kernel_lift  # needs Triton

        order, read, zeros = spec.columns, spec.read, partial(torch.zeros, dtype=self.dtype, device=device)
        written = order.in_features * self.dtype.itemsize + order.k_packed * spec.target.itemsize
        most = self.limit_tokens(read * self.dtype.itemsize + written)
        gain = zeros(order.in_features) if spec.prologue in NORMS else None
        for tokens in list_batches(most, (route.from_tokens for route in weight.routes)):
            if weight.pick(tokens)[0].backend == backend:
                x = zeros(tokens, read)
                residual = x if spec.prologue in ADDING else None
                find_kernel_lift(spec, tokens, x.device).run(x, residual, gain, 0.0)
