"""SlideLinear: a linear layer on a packed weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from slidesparse import ops
from slidesparse.base.arguments import require_kind
from slidesparse.base.log import log_once
from slidesparse.errors import InputError, SlideSparseError
from slidesparse.gemm import Choice, Problem, choose, get_backend
from slidesparse.gemm.select import Fallback
from slidesparse.gemm.spec import WeightSpec
from slidesparse.layer.dense_weight import DenseWeight
from slidesparse.layer.weight_form import WeightForm
from slidesparse.ops.inference_only import no_backward
from slidesparse.pruning import Linears, get_pruner
from slidesparse.weights.packed import PackedWeight, check_scale
from slidesparse.weights.packing import pack, pack_weight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import (
    FLOATS,
    QUANTISED,
    ActivationRounding,
    Rounding,
    dequantize,
    dtype_name,
    parse_dtype,
)
from slidesparse.weights.support import checked_bias, require_dense

BIAS = "bias of SlideLinear"


class SlideLinear(nn.Module):
    """``y = x W^T + b`` with W packed, in inference.

    Activations [..., in] in bfloat16, float16 or float32; outputs [..., out] in the same type. With an INT8 or FP8
    weight each token is quantised on the way in (:mod:`weights.quant`). Under ``torch.autocast`` activations may
    have any of these types, and outputs have autocast's, rounded once from what they are without it.

    Build it on the device on which it will run: the backend is chosen for that device. ``model.to(dtype)`` moves the
    layer but leaves its types alone. Its state dict has the tensors of a checkpoint (docs/formats.md), in no backend's
    form: ``weight`` [out, in], zeros in place and on the CPU, ``weight_scale`` float32 [out, 1] and ``bias`` [out].

    Args:
        packed: The weight; an INT8 or FP8 one with its scale.
        bias: [out], float, or None.
        backend: ``auto`` or a backend's name.
        fallback: The rule of ``auto`` where sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        choice: Backends of this weight from :func:`layer.settle.settle`; None: by ``backend`` and ``fallback``.
        dense_dtype: Type of :attr:`weight` where the packed one is in 8 bits; None: the bias's type, or torch's
            default. Products do not depend on it.
        activation_rounding: The server whose rounding of activations to 8 bits is reproduced, ``vllm`` or ``sglang``;
            they differ in ties and the smallest rows (:func:`weights.quant.quantize_rows`).

    Attributes:
        choice: The backends, their numbers of tokens, and the reason; logged once for each kind of layer.
        forms: The weight in the form of each backend.
        spec: The weight's description for operators: the text of a :class:`slidesparse.gemm.spec.WeightSpec`.
    """

    weight_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        backend: str = "auto",
        fallback: Fallback = "dense",
        choice: Choice | None = None,
        dense_dtype: torch.dtype | None = None,
        activation_rounding: ActivationRounding = "vllm",
    ) -> None:
        super().__init__()
        require_kind(packed, PackedWeight, "weight of SlideLinear", "a PackedWeight, which slidesparse.pack makes")
        require_kind(choice, (Choice, type(None)), "choice of SlideLinear", "a Choice, from slidesparse.gemm.choose")
        require_kind(dense_dtype, (torch.dtype, type(None)), "dense_dtype of SlideLinear", "a type of torch")
        check_scale(packed)
        self.out_features, self.in_features = packed.shape
        self.pattern, self.k_offset = packed.pattern, packed.k_offset
        self.weight_dtype, self.activation_rounding = packed.dtype, activation_rounding
        named = dense_dtype or getattr(bias, "dtype", None) or torch.get_default_dtype()
        self.dense_dtype: torch.dtype = packed.dtype if packed.dtype in FLOATS else named
        self._asked: tuple[str, Fallback] = backend, fallback
        self.choice = choose(Problem.of(packed), backend, fallback) if choice is None else choice
        self._set_forms(packed)
        # Not persistent: the state dict has it in a checkpoint's shape (_save_to_state_dict).
        self.register_buffer("weight_scale", packed.scale, persistent=False)
        self.register_buffer("bias", None if bias is None else checked_bias(bias, self.out_features, BIAS))
        log_once(self._summary())

    def _set_forms(self, packed: PackedWeight) -> None:
        """Bring a packed weight into the form of every backend in ``choice``."""
        forms = nn.ModuleList(WeightForm(packed, name) for name in self.choice.backends)
        self.forms = cast("list[WeightForm]", forms)  # a ModuleList, which has no type for its elements
        self._forms = tuple(self.forms)  # the same, found without a Module's search for attributes
        specs = tuple(form.spec() for form in self.forms)
        kind = self.out_features, dtype_name(packed.dtype)
        self.spec = WeightSpec(*kind, specs, self.choice.routes, self.activation_rounding).text

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        pattern: Pattern | str,
        dtype: str | torch.dtype = "int8",
        *,
        method: str | None = None,
        backend: str = "auto",
        fallback: Fallback = "dense",
        rounding: Rounding = "absmax",
        name: str = "weight",
    ) -> SlideLinear:
        """Make a SlideLinear of a linear layer.

        Args:
            linear: The layer, whose weight [out, in] and bias are taken.
            pattern: The pattern of the packed weight.
            dtype: ``int8`` or ``fp8`` to quantise; ``bf16``, ``fp16`` or ``fp32`` to store as that.
            method: A pruning method to apply first; None if the weight satisfies the pattern.
            backend: ``auto`` or a backend's name.
            fallback: The rule of ``auto`` where sparsity does not pay: see :mod:`slidesparse.gemm.select`.
            rounding: Rounding of ``int8``: ``6bit`` to six bits, which take 0.8 of the memory in our own kernels,
                unless the pattern is dense.
            name: The weight's name in error messages.

        Raises:
            PatternViolation: The weight does not satisfy the pattern and no method was given.
        """
        pattern, storage = Pattern.parse(pattern), parse_dtype(dtype)
        require_kind(linear, nn.Linear, "layer", "a torch.nn.Linear")
        require_kind(name, str, "name of the weight", "a text")
        weight = linear.weight.detach()
        if method is not None:
            weight = get_pruner(method).prune(Linears({name: weight}, pattern))[name]
        packed = pack_weight(weight, pattern, storage, rounding, name=name)
        layer = cls(packed, linear.bias, backend=backend, fallback=fallback, dense_dtype=linear.weight.dtype)
        return layer.train(linear.training)

    @property
    def operand_bytes(self) -> dict[str, int]:
        """Backend -> bytes of its operand."""
        return {form.backend: form.operand_bytes for form in self.forms}

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: x [..., in] -> [..., out]; ``bias`` [out] replaces the layer's own."""
        # Inline, since a call of a function in every step costs more.
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested:
            require_dense(x, "activations of SlideLinear")
        if x.shape[-1:] != (self.in_features,):
            raise InputError("activations of SlideLinear", got=list(x.shape), needed=f"[..., {self.in_features}]")
        if self.weight_dtype in QUANTISED:
            if x.dtype not in FLOATS:
                raise InputError("activations of SlideLinear", got=x.dtype, needed="bf16, fp16 or fp32")
        elif x.dtype != self.weight_dtype:
            if x.dtype not in FLOATS or not torch.is_autocast_enabled(x.device.type):
                raise InputError(
                    "activations of SlideLinear",
                    got=x.dtype,
                    needed=f"{self.weight_dtype}, as the weight",
                    remedy=f"model.to({self.weight_dtype}) brings the rest of the model there",
                )
            x = x.to(self.weight_dtype)
        tokens = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        operands = self.operands(bias)
        # Inline, too, for the same reason.
        y = no_backward(ops.linear, tokens, *operands) if torch.is_grad_enabled() else ops.linear(tokens, *operands)
        if torch.compiler.is_compiling() and torch.is_autocast_enabled(x.device.type):
            # Graphs do not have what the operator does under autocast.
            y = y.to(torch.get_autocast_dtype(x.device.type))
        out: torch.Tensor = y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
        return out

    def operands(self, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Return the arguments of ``ops.linear`` after the activations; ``bias`` as in :meth:`forward`."""
        # Not by attribute, which a Module looks up in several places: half a microsecond each.
        own = self._buffers["bias"] if bias is None else checked_bias(bias, self.out_features, BIAS)
        return self._tensors(), self._buffers["weight_scale"], own, self.spec

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SlideLinear:
        # model.half() must not round an FP8 weight or a float32 scale: take the device of fn's result, keep the type.
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        if self.weight_dtype in QUANTISED:
            self.dense_dtype = fn(torch.empty(0, dtype=self.dense_dtype, device=self.device)).dtype
        return self

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self._forms[0].column_map.device

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        """Return the weight [out, in] in its own type, zeros in place, on the layer's device: the inverse of packing.

        It is exact except for the sign of zeros.

        Raises:
            UnsupportedError: A layer on cuSPARSELt has left its GPU; other layouts are read on any device.
        """
        return self._forms[0].unpack((self.out_features, self.in_features), self.weight_dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in], for code that reads it instead of calling the layer.

        It is dense, in ``dense_dtype``, with channel scales applied, and computed anew for every use: see
        :class:`layer.dense_weight.DenseWeight`. Its shape, type and device cost nothing.
        """
        shape = self.out_features, self.in_features
        return DenseWeight.of(self._dense, shape, self.dense_dtype, self.device)

    def _dense(self) -> torch.Tensor:
        values = self.unpack()
        dense = values if self.weight_scale is None else dequantize(values, self.weight_scale)
        return dense.to(self.dense_dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add ``weight``, ``weight_scale`` [out, 1] and ``bias`` in a checkpoint's form, without operands."""
        weight = self.unpack()
        destination[f"{prefix}weight"] = weight if weight.is_meta else weight.cpu()
        if self.weight_scale is not None:
            destination[f"{prefix}weight_scale"] = self.weight_scale.unsqueeze(1)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Pack the weight of a state dict."""
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, strict, missing_keys, unexpected_keys, error_msgs = rest
        own = [f"{prefix}weight", *([] if self.weight_scale is None else [f"{prefix}weight_scale"])]
        unexpected_keys[:] = [key for key in unexpected_keys if key not in own]
        missing = [key for key in own if key not in state_dict]
        missing_keys += missing if strict else []
        if missing:
            return
        try:
            self._load_weight(*(state_dict[key] for key in own), name=own[0])
        except SlideSparseError as error:
            error_msgs.append(str(error))

    def _load_weight(self, weight: torch.Tensor, scale: torch.Tensor | None = None, *, name: str) -> None:
        if tuple(weight.shape) != (self.out_features, self.in_features) or weight.dtype != self.weight_dtype:
            needed = f"{self.weight_dtype} [{self.out_features}, {self.in_features}]"
            raise InputError(f"form of {name}", got=f"{weight.dtype} {list(weight.shape)}", needed=needed)
        packed = self.pack(weight.detach(), None if scale is None else scale.detach(), name=name)
        if not self.refill(packed):
            if not self.holds_bits(packed):
                self.choice = choose(Problem.of(packed), *self._asked)
            self._set_forms(packed)
            if self.weight_scale is not None and packed.scale is not None:
                self.weight_scale.copy_(packed.scale)

    def pack(self, weight: torch.Tensor, scale: torch.Tensor | None = None, *, name: str = "weight") -> PackedWeight:
        """Pack another weight [out, in] for :meth:`refill`, with this layer's pattern and ``k_offset``.

        Raises:
            PatternViolation: It does not satisfy the pattern.
        """
        weight, scale = weight.to(self.device), None if scale is None else scale.to(self.device)
        return pack(weight, self.pattern, scale=scale, k_offset=self.k_offset, name=name)

    def holds_bits(self, packed: PackedWeight) -> bool:
        """Return whether the backends of this layer can store the values of another weight."""
        bits = (get_backend(name).bits for name in self.choice.backends)
        return all(known is None or known == packed.bits for known in bits)  # reading the values takes time

    @torch.no_grad()
    def refill(self, packed: PackedWeight) -> bool:
        """Copy another packed weight into this layer's tensors, whose addresses are in captured CUDA graphs.

        Returns:
            False, with nothing changed, for a weight of other sizes or with more bits.
        """
        if not self.holds_bits(packed):
            return False
        forms = [WeightForm(packed, name) for name in self.choice.backends]
        new = [tensor for form in forms for tensor in form.tensors]
        own = self._tensors()
        if [form.spec() for form in forms] != [form.spec() for form in self._forms]:
            return False
        if [(t.shape, t.dtype) for t in new] != [(t.shape, t.dtype) for t in own]:
            return False
        for kept, tensor in zip(own, new, strict=True):
            kept.copy_(tensor)
        if self.weight_scale is not None and packed.scale is not None:
            self.weight_scale.copy_(packed.scale)
        if self.device.type == "cuda":  # as in Backend.prepare: a product may fetch weights early
            torch.cuda.current_stream(self.device).synchronize()
        return True

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for form in self._forms for tensor in form.tensors]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # without the forms, which a Module would list

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, dtype={dtype_name(self.weight_dtype)}, backend={'+'.join(self.choice.backends)}"
        )

    def _summary(self) -> str:
        name = f"{self.out_features}x{self.in_features} {self.pattern} {dtype_name(self.weight_dtype)}"
        kept = ", ".join(f"{backend} {size / 1e6:.1f} MB" for backend, size in self.operand_bytes.items())
        return f"{name}: {self.choice.describe()} ({self.choice.reason}); kept: {kept}"
