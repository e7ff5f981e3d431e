"""``SlideLinear.weight``: for models that look at a linear's weight instead of calling the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import slidesparse as ss
from slidesparse.errors import UnsupportedError
from slidesparse.layer.dense_weight import DenseWeight
from slidesparse.layer.linear import SlideLinear

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Counted:
    """A promised weight, and how often it was made."""

    def __init__(self) -> None:
        self.times = 0
        self.weight = DenseWeight.of(self._make, (6, 4), torch.float32, torch.device("cpu"))

    def _make(self) -> torch.Tensor:
        self.times += 1
        return WEIGHT.clone()


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda w: w.dtype, torch.float32),
        (lambda w: (w.shape, w.size(0), w.ndim, w.dim(), w.numel()), ((6, 4), 6, 2, 2, 24)),
        (lambda w: (w.device, w.is_cuda, w.is_meta), (torch.device("cpu"), False, False)),
        (lambda w: (w.requires_grad, w.is_floating_point(), isinstance(w, torch.Tensor)), (False, True, True)),
    ],
)
def test_what_is_known_is_answered_without_making_it(ask: Callable[[torch.Tensor], object], answer: object) -> None:
    counted = Counted()
    assert ask(counted.weight) == answer
    assert counted.times == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w @ torch.ones(4),
        lambda w: nn.functional.linear(torch.ones(2, 4), w),
        lambda w: nn.functional.linear(input=torch.ones(2, 4), weight=w),
        lambda w: w.T,
        lambda w: torch.cat([w, w]),
        lambda w: w[2:, 0],
        lambda w: w.to(torch.float64),
    ],
)
def test_what_computes_with_it_gets_it(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    counted = Counted()
    result = use(counted.weight)
    assert type(result) is torch.Tensor
    assert torch.equal(result, use(WEIGHT))
    assert counted.times >= 1


def test_who_reads_it_by_its_address_reads_the_weight() -> None:
    """As safetensors does, which asks for the address and reads after the call; of two weights it compares them."""
    first, second = Counted().weight, Counted().weight
    read = load(save({"first": first, "second": second}))
    assert torch.equal(read["first"], WEIGHT)
    assert torch.equal(read["second"], WEIGHT)
    assert first.data_ptr() == first.untyped_storage().data_ptr() != second.data_ptr()


def test_what_takes_its_memory_unseen_gets_no_numbers() -> None:
    """Torch asks nobody about the right side of ``data =``. Zeros would look like a weight."""
    linear = nn.Linear(4, 6)
    linear.weight.data = Counted().weight
    assert bool(linear.weight.isnan().all())


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.__setitem__(0, 1),
        lambda w: w.copy_(WEIGHT),
        lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
        lambda w: w.data.copy_(WEIGHT),
        lambda w: w.detach().add_(1.0),
        lambda w: w.data.__setitem__(0, 1.0),
        lambda w: torch.add(WEIGHT, 1.0, out=w),
        lambda w: torch.clamp(w, min=0.0, out=w.data),
    ],
)
def test_it_cannot_be_written_to(write: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written to"):
        write(Counted().weight)


def _pruned(dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = nn.Linear(64, 48).to(dtype)
    linear.weight.data *= ss.prune_mask(linear.weight.detach(), "6:8")
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_answers_in_the_type_of_the_linear_that_it_replaces(dtype: torch.dtype) -> None:
    linear = _pruned(dtype)
    layer = SlideLinear.from_linear(linear, "6:8", "int8")
    assert layer.weight.dtype == dtype
    assert layer.half().weight.dtype == torch.float16
    assert layer.weight_dtype == torch.int8
    dequantised = (layer.unpack().float() * layer.weight_scale.reshape(-1, 1)).half()
    assert torch.equal(layer.weight.clone(), dequantised)


def test_a_float_layer_answers_with_its_own_weight() -> None:
    linear = _pruned(torch.bfloat16)
    layer = SlideLinear.from_linear(linear.float(), "6:8", "bf16")
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.clone(), linear.weight.detach().bfloat16())
    assert "weight" not in dict(layer.named_parameters())
    assert layer.float().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_transformer_runs_with_sparse_linears(compiled: bool) -> None:
    """Its fast path, which would multiply by ``linear1.weight`` itself, steps aside for such a weight."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 64)
    ss.sparsify_(model, "6:8", "fp32")
    assert sum(isinstance(module, SlideLinear) for module in model.modules()) == 4
    dense = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        y = (torch.compile(model, backend="eager") if compiled else model)(x)
        torch.testing.assert_close(y, dense(x), rtol=1e-4, atol=1e-5)


def test_what_lies_behind_it_is_the_same_promise() -> None:
    counted = Counted()
    assert counted.weight.data.dtype == torch.float32
    assert counted.weight.detach().shape == (6, 4)
    assert counted.times == 0
    assert torch.equal(counted.weight.data.clone(), WEIGHT)
