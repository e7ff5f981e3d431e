"""What is timed: one product, and the four linears of a block in a row, both on weights that no cache holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from decoding_linears import BLOCKS, CHECKS, MODEL

from decode.patching import PRODUCT, Variant, applied
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.choose_tiles import Band, choose_bands
from slidesparse.gemm.hopper.kernel import multiprocessors
from slidesparse.gemm.hopper.launch import GemmLaunch, WeightAddresses, find_launch
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.weights import HopperOperand
from slidesparse.gemm.reference import apply_scales
from slidesparse.gemm.reference import product as exact_product
from slidesparse.lifting.layout import LiftSpec, LinearTensors
from slidesparse.offline.known_models import MODELS
from slidesparse.tuning.timing import poison
from slidesparse.weights.quant import quantize_rows
from slidesparse_bench.kernels.operands import gaussian, lifted, packed_weight

BF16, INT8 = torch.bfloat16, torch.int8
PLAIN, CHAINED = ("none",) * 4, ("none", "add_rms_norm", "silu_mul", "add_rms_norm")
"""Prologues of o, gate_up, down and qkv: as decoding_linears has them, and as a server does."""


class Weight:
    """A weight of Gaussian numbers, and copies of it; it is multiplied by so many tokens."""

    def __init__(self, out: int, columns: int, pattern: str, bits: int, tokens: int, copies: int = 1) -> None:
        self.out, self.columns, self.bits, self.tokens = out, columns, bits, tokens
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.backend = HopperSixBits() if bits == 6 else Hopper()
        recipe = "6bit" if bits == 6 else "absmax"
        self.packed = packed_weight(pattern, "int8", out, columns, self.device, recipe)
        operand = self.backend.prepare(self.packed)
        self.copies = [operand] + [copy.deepcopy(operand) for _ in range(copies - 1)]

    @property
    def bands(self) -> tuple[Band, ...]:
        """The launches that the product chooses."""
        return choose_bands(
            self.tokens, self.out, self.copies[0].sparse.shape[1], 0, multiprocessors(self.device.index)
        )

    def takes(self, variant: Variant) -> bool:
        """Whether the variant has a kernel for each tile of them."""
        return all(variant.takes(band.tile, self.bits) for band in self.bands)


class Product:
    """A product of Gaussian activations."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.given = gaussian(weight.tokens, weight.columns, dtype=BF16, device=weight.device)
        self.x, self.scale_x = lifted(self.given, weight.packed, weight.backend.layout, "hopper")
        self.y = torch.empty(weight.tokens, weight.out, dtype=BF16, device=weight.device)

    def reference(self) -> torch.Tensor:
        """The product by definition."""
        values, scale = quantize_rows(self.given, INT8)
        return apply_scales(
            exact_product(values, self.weight.packed.unpack()), scale, self.weight.packed.scale, None, BF16
        )

    def calls(self, variant: Variant) -> list[Callable[[], torch.Tensor]]:
        """The product on each copy of the weight."""
        weight, (dense, sparse) = self.weight, self.weight.copies[0]
        sizes = self.x.shape, INT8, weight.backend.form_of(sparse), dense.shape, sparse.shape, weight.out, BF16
        with applied(variant):
            launch = find_launch(*sizes, weight.device.index)
        return [partial(self._run, launch, own) for own in weight.copies]

    def _run(self, launch: GemmLaunch, own: HopperOperand) -> torch.Tensor:
        addresses = own.dense.data_ptr(), own.sparse.data_ptr(), self.weight.packed.scale.data_ptr(), None, 0
        launch.launch(self.x.data_ptr(), self.scale_x.data_ptr(), WeightAddresses(*addresses), self.y.data_ptr())
        return self.y


class Row:
    """The linears of some blocks, o first. Plain, each has activations of its own; chained, those of the one before."""

    def __init__(self, pattern: str, bits: int, chained: bool, tokens: int) -> None:
        (qkv, *others), self.chained, self.hidden = MODELS[MODEL], chained, MODELS[MODEL][0][1]
        self.weights = [Weight(*size, pattern, bits, tokens, BLOCKS) for size in (*others, qkv)]
        self.prologues, self.columns = CHAINED if chained else PLAIN, [one.columns for one in self.weights]
        numbers = partial(gaussian, tokens, dtype=BF16, device=self.weights[0].device)
        self.inputs = [numbers(self.hidden if chained else sum(self.columns), seed=seed) for seed in (1, 2)]
        self.x, self.residual = self.inputs[0].clone(), numbers(self.hidden, seed=3)
        self.gain = torch.ones(self.hidden, dtype=BF16, device="cuda")

    def call(self, variant: Variant) -> Callable[[], list[torch.Tensor]]:
        """All linears in a row; it returns their products. Where the variant has no kernel, the product's runs."""
        linears = []
        for block, at in product(range(BLOCKS), range(4)):
            own = variant if self.weights[at].takes(variant) else PRODUCT
            with applied(own):  # so each has a launch of its own
                linears.append(self._linear(at, block))
        run = partial(self._run, linears)
        for _ in range(2):  # the first one compiles the lifts
            run()
        if not all(linear.lift.launcher.ready and linear.weight_addresses(tensors) for linear, tensors in linears):
            raise SystemExit("a linear runs by parts, so not by this variant")
        return run

    def _linear(self, at: int, block: int) -> tuple[HopperLinear, LinearTensors]:
        from slidesparse.lifting.kernel import KernelLift  # needs Triton

        weight, prologue = self.weights[at], self.prologues[at]
        layout = weight.backend.layout
        spec = LiftSpec(prologue, BF16, INT8, layout.order(weight.packed).numbers, layout)
        lift = KernelLift(spec, weight.tokens, weight.device)
        linear = HopperLinear(lift, LiftThenMultiply(weight.backend, lift, weight.out), weight.bits)
        own, gain = weight.copies[block], self.gain if "norm" in prologue else None
        return linear, LinearTensors(layout.column_map(weight.packed), None, own, weight.packed.scale, None, gain)

    def _run(self, linears: list[tuple[HopperLinear, LinearTensors]]) -> list[torch.Tensor]:
        products, residual, x = [], self.residual, self.x
        for i, (linear, tensors) in enumerate(linears):
            if not self.chained:
                x = self.x.split(self.columns, 1)[i % 4]
            y, after = linear(x, residual if "add" in self.prologues[i % 4] else None, tensors, 1e-6)
            residual, x = residual if after is None else after, y[:, : self.hidden] if i % 4 == 3 else y
            products.append(y)
        return products

    def expected(self) -> list[list[torch.Tensor]]:
        """The products of both inputs by the product's own kernels."""
        run, found = self.call(PRODUCT), []
        for given in self.inputs:
            self.x.copy_(given)
            found.append(run())
        return found

    def repeats(
        self, replay: Callable[[], object], given: list[torch.Tensor], expected: list[list[torch.Tensor]]
    ) -> bool:
        """Whether replays give these bits, of both inputs by turns: what was read too early shows."""
        for number in range(2 * CHECKS):
            self.x.copy_(self.inputs[number % 2])
            poison(tuple(given))
            replay()
            if not all(map(torch.equal, given, expected[number % 2])):
                return False
        return True
