"""Join RMSNorm and SiLU * up with the sparse linear that reads their result.

SGLang calls one module after another, so there is no graph to rewrite as in vLLM. What belongs together is seen, not
guessed: while the server warms up, a norm or an activation remembers its last result, weakly, and a sparse linear that
is given that very tensor becomes its *reader*. From the next call on, the module runs the reader's fused operator,
which norms or activates where it quantises and lifts, and returns an :class:`Unread` that holds the reader's product.

The result itself is computed and written nowhere, unless something else reads it: that gets what SGLang's own code
makes of the same input, and the module is SGLang's again from then on. CUDA graphs capture the operator as any other;
inside ``torch.compile`` nothing is joined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm

from slidesparse.base.log import log_once
from slidesparse.base.torch_private import can_stand_in, stand_in
from slidesparse.gemm.spec import parse_weight
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.dense_weight import ABOUT, computed
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.prologue import ADDING, NORMS, Prologue
from slidesparse.models.layer_kinds import kind_of

PROLOGUES: dict[type, tuple[Prologue, ...]] = {
    RMSNorm: ("rms_norm", "add_rms_norm"),
    GemmaRMSNorm: ("gemma_norm", "add_gemma_norm"),
    Gemma3RMSNorm: ("gemma_norm", "add_gemma_norm"),
    SiluAndMul: ("silu_mul",),
}
"""SGLang's modules -> the prologues that compute the same, without a residual and with one."""

OTHERWISE = ("cast_x_before_out_mul", "fp32_residual", "override_orig_dtype", "variance_size_override")
"""Attributes of an RMSNorm that computes something else, where they are set."""

KNOWN = ABOUT | {torch.Tensor.stride, torch.Tensor.is_contiguous}
"""Functions that need no values of an :class:`Unread`, which is contiguous."""

READER = "_slidesparse_reader"
"""The attribute of a module that has, or had, a reader: a :class:`Reader`, or None where SGLang's code runs."""

log = logging.getLogger(LOGGER)


class Unread(torch.Tensor):
    """The result [M, K] of a module, not computed: a torch function that needs its values makes SGLang compute it."""

    reader: Reader
    given: tuple[torch.Tensor, ...]
    product: torch.Tensor | None
    result: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer without values where that is possible, or call the function with the result."""
        if func in KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*computed(args, cls), **computed(dict(kwargs or {}), cls))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as an instance's method
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do the same for operators that compiled code calls."""
        return func(*computed(args, cls), **computed(dict(kwargs or {}), cls))

    def make(self) -> torch.Tensor:
        """Return the result, computed by SGLang; the module has no reader from now on."""
        if self.result is None:
            self.result, self.product = self.reader.compute(self.given), None  # what is read may also be written to
            self.reader.leave("something else reads its result")
        return self.result

    def product_of(self, layer: torch.nn.Module, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the product [M, out], once; None for another layer or bias, and where the result was read before."""
        product, self.product = self.product, None
        return product if layer is self.reader.layer and bias is self.reader.bias else None


@dataclass(frozen=True)
class Reader:
    """The sparse linear that reads the result of a module.

    Attributes:
        layer: SGLang's layer; its product is that of ``slide`` and ``bias``.
        name: The layer's name.
        module: The norm or the activation.
        stock: What SGLang calls as its ``forward``.
        dtype: Type of the activations.
    """

    layer: torch.nn.Module
    name: str
    slide: SlideLinear
    bias: torch.Tensor | None
    module: Any
    stock: Callable[..., Any]
    dtype: torch.dtype

    def can_run(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether the fused operator computes what the module computes of these."""
        plain = x.dim() == 2 and len(x) > 0 and x.dtype == self.dtype
        return plain and (residual is None or (residual.dtype == self.dtype and residual.shape == x.shape))

    def run(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Return what the module returns of x [M, K], or [M, 2K]: its result, unread, and the new residual with one."""
        given = (x,) if residual is None else (x, residual)
        prologue = PROLOGUES[type(self.module)][len(given) - 1]
        norm = (self.module.weight, _epsilon(self.module)) if prologue in NORMS else ()
        operator = getattr(torch.ops.slidesparse, f"{prologue}_linear")
        product = operator(*given, *norm, *self.slide.operands(self.bias))
        residual_out = None
        if prologue in ADDING:
            product, residual_out = product
        unread = stand_in(Unread, (len(x), self.slide.in_features), x)
        unread.reader, unread.given, unread.product = self, given, product
        return unread if residual is None else (unread, residual_out)

    def compute(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the result as SGLang computes it of the same tensors, into which its norms write."""
        return first_of(self.stock(self.module, *(tensor.clone() for tensor in given)))

    def leave(self, reason: str) -> None:
        """Let SGLang run the module."""
        self.module.__dict__[READER] = None
        kind = type(self.module).__name__
        log_once(f"slidesparse: {kind_of(self.name)}: not fused with the {kind} before it: {reason}", log=log)


def _epsilon(norm: Any) -> float:
    return float(norm.eps if isinstance(norm, Gemma3RMSNorm) else norm.variance_epsilon)


def first_of(returned: Any) -> torch.Tensor:
    """Return the result among what a module returns, which may be two tensors: result and new residual."""
    result: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return result


@dataclass
class Last:
    """The module without a reader that ran last, what SGLang calls as its forward, and its result, held weakly."""

    module: Any = None
    stock: Any = None
    result: Callable[[], torch.Tensor | None] = lambda: None


LAST = Last()


def watch() -> bool:
    """Let this process's norms and activations remember their results, and run their readers; False if torch cannot."""
    for kind in PROLOGUES if can_stand_in() else ():
        _watch(kind)
    return can_stand_in()


@cache
def _watch(kind: Any) -> None:
    stock = kind.forward

    def forward(module: Any, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or type(module) is not kind:
            return stock(module, *given, **options)
        x, residual, *more = *given, None, None
        reader = module.__dict__.get(READER)
        others = [option for option in (*more, *options.values()) if option is not None]
        if reader is not None and not others and reader.can_run(x, residual):
            return reader.run(x, residual)
        result = stock(module, *given, **options)
        if READER not in module.__dict__:
            LAST.module, LAST.stock, LAST.result = module, stock, ref(first_of(result))
        return result

    kind.forward = forward


def see(
    layer: torch.nn.Module, name: str, slide: SlideLinear, x: torch.Tensor, bias: torch.Tensor | None, warmup: WarmUp
) -> None:
    """Make a sparse layer the reader of the module whose result it is given, and run the kernels that this needs."""
    module = LAST.module
    if LAST.result() is not x or x.dim() != 2 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    reader = Reader(layer, name, slide, bias, module, LAST.stock, x.dtype)
    if READER in module.__dict__:
        reader.leave("two linears read its result")
    elif any(getattr(module, other, None) for other in OTHERWISE):
        reader.leave("it computes something else")
    elif (gain := getattr(module, "weight", x)).dtype != x.dtype or gain.device != x.device:
        reader.leave("its gain is of another type or elsewhere")
    else:
        module.__dict__[READER] = reader
        for prologue in PROLOGUES[type(module)]:
            warmup.lift(prologue, parse_weight(slide.spec), x.device)
        log_once(f"slidesparse: {kind_of(name)}: fused with the {type(module).__name__} before it", log=log)
