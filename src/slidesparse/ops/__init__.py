"""The operators that torch.compile and CUDA graphs see, in the namespace ``torch.ops.slidesparse``.

Each is functional, has a fake implementation (shapes only, the number of tokens symbolic) and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from slidesparse.errors import InputError
from slidesparse.gemm.backend import Backend, ChainCall, Layout, LinearCall, with_rows
from slidesparse.gemm.chain import Placed, parse_links, place
from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import parse_switch
from slidesparse.kernels.lift_variant import First
from slidesparse.layout import Columns
from slidesparse.ops.register import define
from slidesparse.prologue import add_rms_norm, rms_norm, silu_mul
from slidesparse.quant import quantize_rows
from slidesparse.slide import gather
from slidesparse.support import dense_rows

if TYPE_CHECKING:
    from slidesparse.kernels.lift import Call  # needs Triton

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Of what was lifted: values, their scale, and the new residual behind ``add_rms_norm``."""

KERNEL_INPUTS = (torch.bfloat16, torch.float16, torch.float32)


def _check_finite(x: torch.Tensor) -> None:
    # On a GPU this would wait for the device; there NaN and Inf show as a NaN scale and NaN outputs of that token.
    if x.device.type == "cpu" and not bool(torch.isfinite(x).all()):
        raise InputError("activations hold NaN or Inf", needed="finite activations")


@lru_cache(maxsize=1 << 16)
def _kernel_call(
    backend: Backend,
    first: First,
    tokens: int,
    source: torch.dtype,
    target: torch.dtype,
    device: torch.device,
    order: tuple[int, ...],
) -> Call | None:
    """:class:`slidesparse.kernels.lift.Call`, or None where the torch definition must do.

    Kept, as :func:`_step` is: a model has few linears, and a server many numbers of tokens.
    """
    needed = (8, 9) if target == torch.float8_e4m3fn else (8, 0)
    if not order or device.type != "cuda" or source not in KERNEL_INPUTS or find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < needed:
        return None
    from slidesparse.kernels.lift import Call

    columns = Columns(*order)  # type: ignore[arg-type] # mypy does not count them
    slabs, rows = backend.layout.slabs, backend.layout.rows(tokens)
    return Call(columns, source, target, first, tokens, device, slabs, rows if slabs is None else None)


def _lifted(
    first: First,
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: Backend,
    pairs: torch.Tensor | None,
    order: tuple[int, ...],
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
) -> Parts:
    """What the operators that lift give: see :func:`_lifted_by`."""
    call = _kernel_call(backend, first, x.shape[0], x.dtype, dtype, x.device, order)
    return _lifted_by(call, first, x, column_map, dtype, backend.layout, pairs, weight, residual, eps)


def _lifted_by(
    call: Call | None,
    first: First,
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    layout: Layout,
    pairs: torch.Tensor | None,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> Parts:
    """Lifted values in a layout, their scale, and the new residual, by a kernel or by the torch definition."""
    if call is None:
        return _lifted_by_torch(first, x, column_map, dtype, layout, weight, residual, eps)
    return call(dense_rows(x), pairs, weight, None if residual is None else dense_rows(residual), eps)


def _lifted_by_torch(
    first: First,
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    layout: Layout,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> Parts:
    total = None
    if first == "silu_mul":
        x = silu_mul(x)
    elif first == "rms_norm" and weight is not None:
        x = rms_norm(x, weight, eps)
    elif first == "add_rms_norm" and weight is not None and residual is not None:
        x, total = add_rms_norm(x, residual, weight, eps)
    _check_finite(x)
    if dtype == x.dtype:
        return _for_backend(gather(x, column_map), layout), None, total
    values, scale = quantize_rows(x, dtype)
    return _for_backend(gather(values, column_map), layout), scale, total


def _for_backend(lifted: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Row-major activations [M, K'] in a backend's layout, through torch."""
    tokens, width = lifted.shape
    if layout.slabs is not None:
        return layout.slabs.arrange(lifted).view(-1, width)[:tokens]
    return with_rows(lifted, layout.rows(tokens))[:tokens]


# -- quantise and lift, alone and behind what stands between two linears -------------------------------------------


def _quantize_lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    pairs: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _lifted("none", x, column_map, dtype, get_backend(backend), pairs, tuple(order))[:2]


def _quantize_lift_fake(
    x: torch.Tensor, column_map: torch.Tensor, dtype: torch.dtype, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[0]
    return x.new_empty(tokens, column_map.shape[0], dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)


def _lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    backend: str = "reference",
    pairs: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> torch.Tensor:
    return _lifted("none", x, column_map, x.dtype, get_backend(backend), pairs, tuple(order))[0]


def _lift_fake(x: torch.Tensor, column_map: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], column_map.shape[0])


def _rms_norm_quantize_lift(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    pairs: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _lifted("rms_norm", x, column_map, dtype, get_backend(backend), pairs, tuple(order), weight, eps=eps)[:2]


def _rms_norm_quantize_lift_fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, column_map: torch.Tensor, dtype: torch.dtype, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_lift_fake(x, column_map, dtype)


def _add_rms_norm_quantize_lift(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    pairs: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return _lifted(
        "add_rms_norm", x, column_map, dtype, get_backend(backend), pairs, tuple(order), weight, residual, eps
    )


def _add_rms_norm_quantize_lift_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_quantize_lift_fake(x, column_map, dtype), x.new_empty(x.shape)


def _silu_mul_quantize_lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    pairs: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _lifted("silu_mul", x, column_map, dtype, get_backend(backend), pairs, tuple(order))[:2]


# -- multiply ------------------------------------------------------------------------------------------------------


def _gemm(
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    operand: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return get_backend(backend).matmul(x, scale_x, tuple(operand), scale_w, bias, out_features, out_dtype)


def _gemm_fake(
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    operand: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=out_dtype)


class Step(NamedTuple):
    """What a linear does with so many tokens.

    Attributes:
        first: What comes before it.
        backend: Name of the one that multiplies.
        tensors: Which of the operator's tensors are of its form of the weight.
        call: The kernel that lifts, or None where the torch definition must do.
        whole: Lifts and multiplies at once, where the backend can.
        out_features: Rows of the weight.
        dtype: Its type.
    """

    first: First
    backend: str
    tensors: slice
    call: Call | None
    whole: LinearCall | None
    out_features: int
    dtype: torch.dtype


@lru_cache(maxsize=1 << 16)
def _step(switch: str, first: First, tokens: int, source: torch.dtype, device: torch.device) -> Step:
    """What the weight of ``switch`` does with so many tokens of this type, there: the one look-up of a call."""
    weight = parse_switch(switch)
    form, start = weight.pick(tokens)
    backend, where = get_backend(form.backend), slice(start, start + form.tensors)
    call = _kernel_call(backend, first, tokens, source, weight.weight_dtype, device, form.order)
    whole = None
    if backend.linear_call is not None and call is not None and tokens and weight.out_features:
        whole = backend.linear_call(call, weight.out_features)
    return Step(first, form.backend, where, call, whole, weight.out_features, weight.weight_dtype)


def _multiplied(
    first: First,
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    switch: str,
    *,
    gain: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product of the form that runs so many tokens, and the new residual."""
    step = _step(switch, first, x.shape[0], x.dtype, x.device)
    return _run(step, x, tensors[step.tensors], scale_w, bias, gain, residual, eps)


def _run(
    step: Step,
    x: torch.Tensor,
    form: Sequence[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if step.whole is not None:
        given = step.whole(x, form, scale_w, bias, gain, residual, eps)
        if given is not None:
            return given
    column_map, moved, *operand = form
    if column_map.device != x.device:
        raise InputError(
            "activations and weight on two devices",
            got=f"{x.device}, {column_map.device}",
            needed="one device",
            remedy="move the activations; build the layer on the device on which it runs",
        )
    pairs, layout = moved if moved.numel() else None, get_backend(step.backend).layout
    lifted = _lifted_by(step.call, step.first, x, column_map, step.dtype, layout, pairs, gain, residual, eps)
    values, scale_x, total = lifted
    return _gemm(values, scale_x, operand, scale_w, bias, step.out_features, x.dtype, step.backend), total


def _linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return _multiplied("none", x, *weight)[0]


def _linear_fake(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], parse_switch(weight[-1]).out_features)


def _rms_norm_linear(x: torch.Tensor, gain: torch.Tensor, eps: float, *weight: Any) -> torch.Tensor:
    return _multiplied("rms_norm", x, *weight, gain=gain, eps=eps)[0]


def _rms_norm_linear_fake(x: torch.Tensor, gain: torch.Tensor, eps: float, *weight: Any) -> torch.Tensor:
    return _linear_fake(x, *weight)


def _add_rms_norm_linear(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _multiplied("add_rms_norm", x, *weight, gain=gain, residual=residual, eps=eps)


def _add_rms_norm_linear_fake(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _linear_fake(x, *weight), x.new_empty(x.shape)


def _silu_mul_linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return _multiplied("silu_mul", x, *weight)[0]


class Piece(NamedTuple):
    """Links of a chain that one backend runs.

    Attributes:
        whole: All of them at once, where the backend can.
        steps: What each does, and where its tensors stand.
    """

    whole: ChainCall | None
    steps: tuple[tuple[Step, Placed], ...]


@lru_cache(maxsize=1 << 16)
def _pieces(links: str, tokens: int, source: torch.dtype, device: torch.device) -> tuple[Piece, ...]:
    """What a chain does with so many tokens of this type, there."""
    found, start = [], 0
    for link in parse_links(links):
        step = _step(link.weight.to_text(), link.first, tokens, source, device)
        found.append((step, place(link, start, step.tensors)))
        start += link.tensors
    return tuple(_piece(name, tuple(group)) for name, group in groupby(found, key=lambda linked: linked[0].backend))


def _piece(backend: str, links: tuple[tuple[Step, Placed], ...]) -> Piece:
    join, linears = get_backend(backend).chain_call, [(step.whole, placed) for step, placed in links]
    if join is None or len(links) == 1 or any(whole is None for whole, _ in linears):
        return Piece(None, links)
    return Piece(join(linears), links)


def _chain(
    x: torch.Tensor, residual: torch.Tensor, tensors: list[torch.Tensor], links: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    total: torch.Tensor | None = residual
    for whole, steps in _pieces(links, x.shape[0], x.dtype, x.device):
        given = None if whole is None else whole(x, total, tensors)
        x, total = _one_by_one(steps, x, total, tensors) if given is None else given
    return x, total


def _one_by_one(
    links: tuple[tuple[Step, Placed], ...], x: torch.Tensor, total: torch.Tensor | None, tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    for step, placed in links:
        form, scale_w, bias, gain = placed.of(tensors)
        x, new = _run(step, x, form, scale_w, bias, gain, total if placed.adds else None, placed.eps)
        total = new if placed.adds else total
    return x, total


def _chain_fake(
    x: torch.Tensor, residual: torch.Tensor, tensors: list[torch.Tensor], links: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], parse_links(links)[-1].weight.out_features), x.new_empty(residual.shape)


define(
    "quantize_lift",
    "(Tensor x, Tensor column_map, ScalarType dtype, str backend='reference', Tensor? pairs=None, int[] order=[])"
    " -> (Tensor, Tensor)",
    _quantize_lift,
    _quantize_lift_fake,
)
define(
    "lift",
    "(Tensor x, Tensor column_map, str backend='reference', Tensor? pairs=None, int[] order=[]) -> Tensor",
    _lift,
    _lift_fake,
)
define(
    "rms_norm_quantize_lift",
    "(Tensor x, Tensor weight, float eps, Tensor column_map, ScalarType dtype, str backend='reference',"
    " Tensor? pairs=None, int[] order=[]) -> (Tensor, Tensor)",
    _rms_norm_quantize_lift,
    _rms_norm_quantize_lift_fake,
)
define(
    "add_rms_norm_quantize_lift",
    "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor column_map, ScalarType dtype,"
    " str backend='reference', Tensor? pairs=None, int[] order=[]) -> (Tensor, Tensor, Tensor)",
    _add_rms_norm_quantize_lift,
    _add_rms_norm_quantize_lift_fake,
)
define(
    "silu_mul_quantize_lift",
    "(Tensor x, Tensor column_map, ScalarType dtype, str backend='reference', Tensor? pairs=None, int[] order=[])"
    " -> (Tensor, Tensor)",
    _silu_mul_quantize_lift,
    _quantize_lift_fake,
)
define(
    "gemm",
    "(Tensor x, Tensor? scale_x, Tensor[] operand, Tensor? scale_w, Tensor? bias, SymInt out_features,"
    " ScalarType out_dtype, str backend) -> Tensor",
    _gemm,
    _gemm_fake,
)

_WEIGHT = "Tensor[] tensors, Tensor? scale_w, Tensor? bias, str switch"

define("linear", f"(Tensor x, {_WEIGHT}) -> Tensor", _linear, _linear_fake)
define(
    "rms_norm_linear",
    f"(Tensor x, Tensor gain, float eps, {_WEIGHT}) -> Tensor",
    _rms_norm_linear,
    _rms_norm_linear_fake,
)
define(
    "add_rms_norm_linear",
    f"(Tensor x, Tensor residual, Tensor gain, float eps, {_WEIGHT}) -> (Tensor, Tensor)",
    _add_rms_norm_linear,
    _add_rms_norm_linear_fake,
)
define("silu_mul_linear", f"(Tensor x, {_WEIGHT}) -> Tensor", _silu_mul_linear, _linear_fake)
define("chain", "(Tensor x, Tensor residual, Tensor[] tensors, str links) -> (Tensor, Tensor)", _chain, _chain_fake)

quantize_lift = torch.ops.slidesparse.quantize_lift
"""(x [M, K], column_map int64 [K'], dtype, backend, pairs, order) -> lifted values [M, K'], scale float32 [M, 1].

The bytes of the values stand as the layout of ``backend`` asks (:class:`slidesparse.gemm.backend.Layout`). ``order``
and ``pairs`` are the fields of :class:`slidesparse.layout.Columns`; with them a GPU runs one kernel, else torch its
definition."""

lift = torch.ops.slidesparse.lift
"""(x [M, K], column_map int64 [K'], backend, pairs, order) -> lifted activations [M, K'], as ``quantize_lift``."""

rms_norm_quantize_lift = torch.ops.slidesparse.rms_norm_quantize_lift
"""(x [M, K], weight [K], eps, column_map, dtype, backend, pairs, order) -> values [M, K'], scale [M, 1]:
:func:`slidesparse.prologue.rms_norm`, then ``quantize_lift``, in one launch where there is a kernel."""

add_rms_norm_quantize_lift = torch.ops.slidesparse.add_rms_norm_quantize_lift
"""(x [M, K], residual [M, K], weight [K], eps, column_map, dtype, backend, pairs, order) -> values [M, K'],
scale [M, 1], new residual [M, K]: the same with :func:`slidesparse.prologue.add_rms_norm`."""

silu_mul_quantize_lift = torch.ops.slidesparse.silu_mul_quantize_lift
"""(x [M, 2K] gate then up, column_map, dtype, backend, pairs, order) -> values [M, K'], scale [M, 1]: the same with
:func:`slidesparse.prologue.silu_mul`."""

gemm = torch.ops.slidesparse.gemm
"""See :meth:`slidesparse.gemm.backend.Backend.matmul`; ``backend`` is a backend's name."""

linear = torch.ops.slidesparse.linear
"""(x [M, K], tensors, scale_w [out], bias [out], switch) -> [M, out] in the type of x.

``quantize_lift`` or ``lift``, then ``gemm``. ``switch`` (:class:`slidesparse.gemm.spec.Switch`, as text) says how
large the weight is, of which type, and in which form it is multiplied by M tokens; ``tensors`` are those of all forms
in turn."""

rms_norm_linear = torch.ops.slidesparse.rms_norm_linear
"""(x [M, K], gain [K], eps, then as ``linear`` behind its x) -> ``linear`` of :func:`slidesparse.prologue.rms_norm`;
for quantised weights only."""

add_rms_norm_linear = torch.ops.slidesparse.add_rms_norm_linear
"""(x [M, K], residual [M, K], gain [K], eps, then as ``linear``) -> its product and the new residual, the same with
:func:`slidesparse.prologue.add_rms_norm`."""

silu_mul_linear = torch.ops.slidesparse.silu_mul_linear
"""(x [M, 2K], then as ``linear``): the same with :func:`slidesparse.prologue.silu_mul`."""

chain = torch.ops.slidesparse.chain
"""(x, residual [M, K], tensors, links) -> what the last of several linears gives, and the last new residual.

Each takes what the one before it gave. ``links`` (:class:`slidesparse.gemm.chain.Link`, as text) says which of the
operators above each is, and which of ``tensors`` are its own; those behind ``add_rms_norm`` hand the residual on."""
