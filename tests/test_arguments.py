"""Arguments of any kind: the public functions take them or refuse them by the package's own errors, in one line."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slidesparse import (
    HeldZeros,
    InputError,
    PackedWeight,
    Pattern,
    SlideLinear,
    SlideSparseError,
    evaluate,
    lift,
    load,
    matmul,
    pack,
    prune,
    prune_mask,
    recover,
    sparsify_,
)
from slidesparse.weights.support import tightest_pattern

WEIGHT = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
ZEROS = torch.zeros(16, 32)
INT8 = pack(ZEROS.to(torch.int8), "6:8", scale=torch.ones(16))
LAYER = SlideLinear(INT8)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def from_linear(layer: Any = None, pattern: Any = "6:8", dtype: Any = "int8", **options: Any) -> SlideLinear:
    layer = nn.Linear(32, 32) if layer is None else layer
    return SlideLinear.from_linear(layer, pattern, dtype, **{"method": "magnitude", **options})


CALLS: dict[str, Callable[[Any], object]] = {
    "Pattern keep": lambda v: Pattern(v, 8),
    "Pattern group": lambda v: Pattern(6, v),
    "Pattern.parse": Pattern.parse,
    "Pattern.window": lambda v: Pattern(6, 8).window(v),
    "Pattern.groups": lambda v: Pattern(6, 8).groups(v),
    "Pattern.bytes_per_weight": lambda v: Pattern(6, 8).bytes_per_weight(v),
    "Pattern bits": lambda v: Pattern(6, 8).bytes_per_weight("2:4", v),
    "pack weight": lambda v: pack(v, "6:8"),
    "pack pattern": lambda v: pack(ZEROS, v),
    "pack scale": lambda v: pack(ZEROS, "6:8", scale=v),
    "pack k_offset": lambda v: pack(ZEROS, "6:8", k_offset=v),
    "prune_mask weight": lambda v: prune_mask(v, "6:8"),
    "prune_mask pattern": lambda v: prune_mask(WEIGHT, v),
    "lift x": lambda v: lift(v, "6:8"),
    "lift pattern": lambda v: lift(WEIGHT, v),
    "lift k_offset": lambda v: lift(WEIGHT, "6:8", v),
    "tightest_pattern weight": tightest_pattern,
    "tightest_pattern candidates": lambda v: tightest_pattern(WEIGHT, v),
    "tightest_pattern k_offset": lambda v: tightest_pattern(WEIGHT, k_offset=v),
    "SlideLinear packed": SlideLinear,
    "SlideLinear bias": lambda v: SlideLinear(INT8, v),
    "SlideLinear backend": lambda v: SlideLinear(INT8, backend=v),
    "SlideLinear fallback": lambda v: SlideLinear(INT8, fallback=v),
    "SlideLinear x": LAYER,
    "SlideLinear call's bias": lambda v: LAYER(WEIGHT, v),
    "from_linear layer": from_linear,
    "from_linear dtype": lambda v: from_linear(dtype=v),
    "from_linear method": lambda v: from_linear(method=v),
    "from_linear name": lambda v: from_linear(name=v),
    "sparsify_ model": lambda v: sparsify_(v, "6:8"),
    "sparsify_ pattern": lambda v: sparsify_(two_layers(), v),
    "sparsify_ ignore": lambda v: sparsify_(two_layers(), "6:8", ignore=v),
    "sparsify_ layers": lambda v: sparsify_(two_layers(), "6:8", layers=v),
    "sparsify_ method": lambda v: sparsify_(two_layers(), "6:8", method=v),
    "sparsify_ calibration": lambda v: sparsify_(two_layers(), "6:8", calibration=v),
    "sparsify_ match_steps": lambda v: sparsify_(two_layers(), "6:8", match_steps=v),
    "load path": load,
    "load device": lambda v: load("nowhere", v),
    "load tune": lambda v: load("nowhere", tune=v),
    "load revision": lambda v: load("name/space", revision=(v, v)),  # no text: one would be fetched
    "HeldZeros model": HeldZeros,
    "Pattern.groups k_offset": lambda v: Pattern(6, 8).groups(32, v),
    "sparsify_ entry": lambda v: sparsify_(two_layers(), "6:8", ignore=[v]),
    "sparsify_ layer": lambda v: sparsify_(two_layers(), "6:8", layers={"0": v}),
    "matmul x": lambda v: matmul(v, INT8),
    "matmul packed": lambda v: matmul(WEIGHT, v),
    "matmul bias": lambda v: matmul(WEIGHT, INT8, v),
    "matmul out_dtype": lambda v: matmul(WEIGHT, INT8, out_dtype=v),
    "matmul backend": lambda v: matmul(WEIGHT, INT8, backend=v),
    "SlideLinear choice": lambda v: SlideLinear(INT8, choice=v),
    "SlideLinear dense_dtype": lambda v: SlideLinear(INT8, dense_dtype=v),
    "from_linear rounding": lambda v: from_linear(rounding=v),
    "PackedWeight": lambda v: SlideLinear(PackedWeight(v, (16, 32), 0, INT8.values, INT8.code)),
    "PackedWeight values": lambda v: PackedWeight(Pattern(6, 8), (16, 32), 0, v, INT8.code),
    "PackedWeight.to": INT8.to,
    "PackedWeight.lift": INT8.lift,
    "PackedWeight.column_map": INT8.column_map,
}

NOWHERE = Path("nowhere")
FUNCTIONS: list[tuple[Callable[..., object], dict[str, Any]]] = [
    (prune, {"source": NOWHERE, "destination": "x", "dtype": "int8", "method": "wanda"}),
    (recover, {"pruned": NOWHERE, "dense": NOWHERE, "destination": "x", "texts": "text.txt", "tokens": 10**6}),
    (evaluate, {"checkpoint": NOWHERE, "text": "nowhere.txt"}),
]
for function, given in FUNCTIONS:
    for argument in signature(function).parameters:
        CALLS[f"{function.__name__} {argument}"] = partial(
            lambda call, usual, name, v: call(**{**usual, name: v}), function, given, argument
        )

VALUES: dict[str, Any] = {
    "None": None,
    "empty list": [],
    "list": [1, 2],
    "nested list": [[1.0, 2.0]],
    "tuple": (6, 8),
    "text": "x",
    "empty text": "",
    "bytes": b"x",
    "minus one": -1,
    "zero": 0,
    "huge": 2**80,
    "5000 digits": 10**5000,
    "pattern of 5000 digits": f"6:{'8' * 5000}",
    "huge Fraction": Fraction(10**400, 3),
    "Decimal": Decimal("1e999999"),
    "Infinity": float("inf"),
    "NUL": "a\0b",
    "generator": (one for one in ()),
    "sparse": torch.eye(32).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": torch.quantize_per_tensor(torch.ones(16, 32), 1.0, 0, torch.quint8),
    "e5m2": torch.ones(16, 32).to(torch.float8_e5m2),
    "uint16": torch.ones(16, 32, dtype=torch.uint16),
    "linear on meta": nn.Linear(32, 32, device="meta"),
    "half": 0.5,
    "NaN": float("nan"),
    "True": True,
    "dict": {"a": 1},
    "object": object(),
    "function": lambda: None,
    "class": int,
    "NumPy array": np.ones((16, 32)),
    "NumPy number": np.int64(-3),
    "number in a tensor": torch.tensor(3.0),
    "empty tensor": torch.ones(0),
    "cube": torch.ones(2, 2, 2),
    "no rows": torch.ones(0, 32),
    "no columns": torch.ones(16, 0),
    "complex": torch.ones(16, 32, dtype=torch.complex64),
    "bools": torch.ones(16, 32, dtype=torch.bool),
    "int64": torch.ones(16, 32, dtype=torch.int64),
    "float64": torch.ones(16, 32, dtype=torch.float64),
    "meta": torch.empty(16, 32, device="meta"),
    "NaNs": torch.full((16, 32), float("nan")),
    "module": nn.ReLU(),
    "dtype": torch.float64,
}


def test_nothing_but_our_own_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for (call, run), (name, value) in product(CALLS.items(), VALUES.items()):
        try:
            run(value)
        except SlideSparseError as error:
            assert "\n" not in str(error), (call, name)  # noqa: PT017 - most values raise, and some may be good
        except Exception as error:
            raise AssertionError(f"{call} = {name}") from error


@pytest.mark.parametrize(
    "call",
    ["pack weight", "prune_mask weight", "lift x", "tightest_pattern weight", "SlideLinear packed", "sparsify_ model"],
)
def test_what_is_no_tensor_or_model_is_refused(call: str) -> None:
    for value in ("None", "list", "text", "NumPy array", "object", "dict"):
        with pytest.raises(InputError, match="needed a "):
            CALLS[call](VALUES[value])


def test_an_ignore_list_is_a_list() -> None:
    """A text would be taken for a list of its letters."""
    with pytest.raises(InputError, match="ignore; got 'lm_head'"):
        sparsify_(two_layers(), "6:8", ignore="lm_head")
