"""Join RMSNorm and SiLU * up with the sparse linear that reads their result.

SGLang, unlike vLLM, has no graph to rewrite, so pairs are observed: while the server warms up, a norm or an activation
remembers its last result, weakly, and a sparse linear that gets this very tensor becomes its *reader*. From then on the
module runs the reader's fused operator, and returns an :class:`Unread` with the product. CUDA graphs capture the
operator as any other; inside ``torch.compile`` nothing is joined.

The result itself is not computed. If something else reads it, SGLang's own code computes it from the same input, which
must still be there, and the module stays SGLang's from then on.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import Gemma3RMSNorm, GemmaRMSNorm, RMSNorm

from slidesparse.base import torch_private
from slidesparse.base.log import log_once
from slidesparse.gemm.spec import parse_weight
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.dense_weight import ABOUT, computed
from slidesparse.lifting.prologue import NORMS, Prologue
from slidesparse.models.layer_kinds import kind_of

PROLOGUES: dict[type, tuple[Prologue, ...]] = {
    RMSNorm: ("rms_norm", "add_rms_norm"),
    GemmaRMSNorm: ("gemma_norm", "add_gemma_norm"),
    Gemma3RMSNorm: ("gemma_norm", "add_gemma_norm"),
    SiluAndMul: ("silu_mul",),
}
"""SGLang's modules -> their prologues, without and with a residual."""

KNOWN = ABOUT | {torch.Tensor.stride, torch.Tensor.is_contiguous}
"""Functions that do not need the values of an :class:`Unread`."""

READER = "_slidesparse_reader"
"""Attribute of a module with a :class:`Reader`; None after the module went back to SGLang."""

log = logging.getLogger(LOGGER)


class Unread(torch.Tensor):
    """The result [M, K] of a module, not computed: a torch function that needs its values makes SGLang compute it."""

    reader: Reader
    given: tuple[torch.Tensor, ...]
    product: torch.Tensor | None
    result: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function without values where possible, else with the result."""
        if func in KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*computed(args, cls), **computed(kwargs or {}, cls))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment] # for operators that compiled code calls

    def make(self) -> torch.Tensor:
        """Compute the result by SGLang's module, which has no reader from then on."""
        if self.result is None:
            returned = self.reader.stock(self.reader.module, *(tensor.clone() for tensor in self.given))
            self.result, self.product = returned[0] if isinstance(returned, tuple) else returned, None
            self.reader.leave("something else reads its result")
        return self.result

    def product_of(self, layer: torch.nn.Module, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the product [M, out], once; None for another layer or bias, and where the result was read before."""
        product, self.product = self.product, None
        return product if layer is self.reader.layer and bias is self.reader.bias else None


class Reader(NamedTuple):
    """A sparse layer of SGLang's that reads the result of a module, whose own ``forward`` is ``stock``."""

    layer: Any
    name: str
    bias: torch.Tensor | None
    module: Any
    stock: Any

    def run(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """Return the module's unread result for x [M, K], or [M, 2K], and with a residual the new one."""
        given = (x,) if residual is None else (x, residual)
        m, prologue = self.module, PROLOGUES[type(self.module)][len(given) - 1]
        norm = (m.weight, m.eps if hasattr(m, "eps") else m.variance_epsilon) if prologue in NORMS else ()
        slide, operator = self.layer.slide, getattr(torch.ops.slidesparse, f"{prologue}_linear")
        product = operator(*given, *norm, *slide.operands(self.bias))
        unread = torch_private.stand_in(Unread, (len(x), slide.in_features), dtype=x.dtype, device=x.device)
        unread.reader, unread.given, unread.product = self, given, product if residual is None else product[0]
        return unread if residual is None else (unread, product[1])

    def leave(self, reason: str) -> None:
        """Return the module to SGLang."""
        self.module.__dict__[READER] = None
        log_once(f"slidesparse: {kind_of(self.name)}: not fused with what is before it: {reason}", log=log)


_LAST: list[Any] = []
"""The last module without a reader that ran, its own ``forward``, and a weak reference to its result."""


@cache
def watch(kind: Any) -> None:
    """Make all modules of a kind in this process remember their results, and run their readers."""
    stock = kind.forward

    def forward(module: Any, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or type(module) is not kind:
            return stock(module, *given, **options)
        reader = module.__dict__.get(READER)
        x, residual, *more = *given, None, None
        plain = reader is not None and all(option is None for option in (*more, *options.values())) and x.dim() == 2
        if plain and len(x) and (residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape)):
            return reader.run(x, residual)
        returned = stock(module, *given, **options)
        if READER not in module.__dict__:
            _LAST[:] = module, stock, ref(returned[0] if isinstance(returned, tuple) else returned)
        return returned

    kind.forward = forward


def see(layer: Any, name: str, x: torch.Tensor, bias: torch.Tensor | None, warmup: WarmUp) -> None:
    """Make a sparse layer the reader of the module that computed its input, and warm up the fused kernels."""
    if not _LAST or _LAST[2]() is not x or x.dim() != 2 or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    module, gain = _LAST[0], getattr(_LAST[0], "weight", x)
    reader = Reader(layer, name, bias, *_LAST[:2])
    otherwise = ("cast_x_before_out_mul", "fp32_residual", "override_orig_dtype", "variance_size_override")
    if READER in module.__dict__:
        reader.leave("two linears read its result")
    elif any(getattr(module, other, None) for other in otherwise) or (gain.dtype, gain.device) != (x.dtype, x.device):
        reader.leave("it computes something else")
    else:
        module.__dict__[READER] = reader
        for prologue in PROLOGUES[type(module)]:
            warmup.lift(prologue, parse_weight(layer.slide.spec), x.device)
        log_once(f"slidesparse: {kind_of(name)}: fused with the {type(module).__name__} before it", log=log)
