"""What of the cuSPARSELt backend needs no GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse import Pattern, UnsupportedError, ops
from slidesparse.gemm import BACKENDS, Problem, choose, get_backend
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt import backend as cusparselt
from slidesparse.gemm.cusparselt import plan as plans
from slidesparse.gemm.cusparselt.backend import token_bucket
from slidesparse.gemm.cusparselt.plan import DEFAULT, Shape, algorithm_of
from slidesparse.gemm.reference import apply_scales
from slidesparse.lifting.layout import with_rows
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import pack_by

INT8, FP8 = torch.int8, torch.float8_e4m3fn


# -- rows ----------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_close() -> None:
    sizes = range(1, 65537)
    buckets = [token_bucket(m) for m in sizes]
    assert buckets == sorted(buckets)
    assert all(b % 16 == 0 and b >= max(m, 32) for m, b in zip(sizes, buckets, strict=True))
    assert all(b <= 1.0625 * m for m, b in zip(sizes, buckets, strict=True) if m >= 256)
    assert all(b < m + 16 for m, b in zip(sizes, buckets, strict=True) if 17 <= m < 256)
    assert len(set(buckets)) == 15 + 8 * 16
    assert token_bucket(0) == 0
    assert all(token_bucket(b) == b for b in set(buckets))


def test_spare_rows_are_found_after_the_activations() -> None:
    buffer = torch.arange(40, dtype=torch.int8).view(8, 5)
    x = buffer[1:3]
    more = with_rows(x, 7)
    assert more.shape == (7, 5)
    assert more.data_ptr() == x.data_ptr()
    assert torch.equal(more, buffer[1:])


@pytest.mark.parametrize("rows", [7, 20])
@pytest.mark.parametrize("strided", [False, True])
def test_activations_without_spare_rows_are_copied(rows: int, strided: bool) -> None:
    x = torch.arange(70, dtype=torch.int8)
    x = x.view(7, 10)[:, :5] if strided else x[35:].view(7, 5)
    more = with_rows(x, rows)
    assert more.shape == (rows, 5)
    assert more.is_contiguous()
    assert torch.equal(more[:7], x)
    assert (more.data_ptr() != x.data_ptr()) == (strided or rows > 7)


def test_operators_leave_room_for_the_backend() -> None:
    x, column_map = torch.randn(3, 8), torch.arange(8)
    lifted = ops.lift(x, column_map, "dense")
    values, scale = ops.quantize_lift(x, column_map, INT8, "dense")
    assert torch.equal(lifted, x)
    assert lifted.untyped_storage().nbytes() == 32 * 8 * 4
    assert values.shape == (3, 8)
    assert values.untyped_storage().nbytes() == 32 * 8
    assert scale.shape == (3, 1)


# -- the product ---------------------------------------------------------------------------------------------------


class _Plan:
    """What the library computes for a shape, from addresses."""

    def __init__(self, shape: Shape, algorithm: int = DEFAULT) -> None:
        self.shape, self.algorithm = shape, algorithm

    def run(self, weight: torch.Tensor, x_pointer: int, y: torch.Tensor, *, accumulate: bool = False) -> None:
        rows, columns, dtype = self.shape.rows, self.shape.columns, self.shape.dtype
        memory = (ctypes.c_uint8 * (rows * columns * dtype.itemsize)).from_address(x_pointer)
        x = torch.frombuffer(memory, dtype=dtype).view(rows, columns)
        assert weight.shape == (self.shape.out, self.shape.columns)
        assert y.shape == (rows, self.shape.out)
        product = x.double() @ weight.double().T
        y.copy_(y + product if accumulate else product)


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize(("pattern", "dtype"), [("6:8", INT8), ("4:6", INT8), ("6:8", FP8), ("6:8", torch.bfloat16)])
def test_a_product_is_put_together_from_the_librarys(
    monkeypatch: pytest.MonkeyPatch, pattern: str, dtype: torch.dtype, current: bool
) -> None:
    entered: list[int] = []
    scaling = pytest.importorskip("slidesparse.gemm.scale", reason="Triton is not installed")

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        monkeypatch.setattr(cusparselt, "is_current", lambda _: True)
        yield

    def scale_rows(acc: torch.Tensor, *rest: Any) -> torch.Tensor:
        scale_x, scale_w, bias, tokens, out, out_dtype = rest
        return apply_scales(acc[:tokens, :out], scale_x, scale_w, bias, out_dtype)

    monkeypatch.setattr(cusparselt, "compress_matrix", lambda matrix: matrix)
    monkeypatch.setattr(cusparselt, "gpu_of", lambda *_: 5)
    monkeypatch.setattr(cusparselt, "is_current", lambda _: current)
    monkeypatch.setattr(cusparselt, "plan_for", _Plan)
    monkeypatch.setattr(cusparselt, "algorithm_of", lambda shape, weight: DEFAULT)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(scaling, "scale_rows", scale_rows)
    weight = torch.randint(-5, 6, (40, 64)) * prune_mask(torch.randn(40, 64), pattern)
    scale = torch.rand(40) + 0.5 if dtype.itemsize == 1 else None
    packed = pack_by(weight.to(dtype), pattern, scale=scale)
    bias, x = torch.randn(40), torch.randint(-3, 4, (33, 64)).bfloat16()

    def run(name: str) -> torch.Tensor:
        backend = get_backend(name)
        column_map = backend.layout.column_map(packed)
        values, scale_x = ops.lift(x, column_map, name), None
        if scale is not None:
            values, scale_x = ops.quantize_lift(x, column_map, dtype, name)
        operand = backend.prepare(packed)
        return backend.matmul(values, scale_x, operand, packed.scale, bias.bfloat16(), 40, torch.bfloat16)

    ours, exact = run("cusparselt"), run("reference")
    assert ours.shape == exact.shape
    if dtype == INT8:
        assert torch.equal(ours, exact)
    assert torch.allclose(ours.float(), exact.float(), rtol=2**-7, atol=2**-7)
    assert entered == ([] if current else [5])


# -- the search ----------------------------------------------------------------------------------------------------

WRONG, REFUSED, REFUSED_AT_ITS_RUN = 0, 1, 2


class _SearchedPlan(_Plan):
    """A plan of a library with six algorithms, of which three are not to be used."""

    algorithms = 6

    def __init__(self, shape: Shape, algorithm: int = DEFAULT) -> None:
        super().__init__(shape, algorithm)
        if algorithm == REFUSED:
            raise UnsupportedError("no such kernel")

    def run(self, weight: torch.Tensor, x_pointer: int, y: torch.Tensor, *, accumulate: bool = False) -> None:
        if self.algorithm == REFUSED_AT_ITS_RUN:
            raise UnsupportedError("no such kernel")
        super().run(weight, x_pointer, y, accumulate=accumulate)
        y[-1, -1] += self.algorithm == WRONG


def _found(
    monkeypatch: pytest.MonkeyPatch, times: dict[int, float], rows: tuple[int, ...] = (64,), *, capturing: bool = False
) -> tuple[list[int], list[tuple[int, int]]]:
    """The algorithms of numbers of rows, and (rows, algorithm) of every run, in order; times are of algorithms."""
    runs = []

    def least_ms(plan: _SearchedPlan, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
        plan.run(weight, x.data_ptr(), y)
        runs.append((plan.shape.rows, plan.algorithm))
        return times.get(plan.algorithm, 1.0)

    monkeypatch.setattr(plans, "MatmulPlan", _SearchedPlan)
    monkeypatch.setattr(plans, "_least_ms", least_ms)
    monkeypatch.setattr(plans, "_ALGORITHMS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    weight = torch.randint(-5, 6, (32, 64), dtype=INT8)
    return [algorithm_of(Shape(-1, 32, 64, m, INT8), weight) for m in rows], runs


def test_the_fastest_algorithm_is_taken_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {WRONG: 0.1, REFUSED: 0.1, REFUSED_AT_ITS_RUN: 0.1, 3: 0.9, 4: 0.5, 5: 0.8}
    found, runs = _found(monkeypatch, times)
    assert found == [4]
    assert runs == [(64, number) for number in (DEFAULT, WRONG, 3, 4, 5)]


def test_the_default_stays_within_3_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found(monkeypatch, {4: 0.98})[0] == [DEFAULT]
    assert _found(monkeypatch, {4: 0.96})[0] == [4]


def test_only_powers_of_two_are_searched_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runs = _found(monkeypatch, {4: 0.5}, (48, 64, 48, 4096, 2048))
    assert found == [4] * 5
    every = (DEFAULT, WRONG, 3, 4, 5)
    assert [number for rows, number in runs if rows == 48] == [DEFAULT, 4]
    for rows in (64, 2048):
        assert tuple(number for m, number in runs if m == rows) == every
    assert not [rows for rows, _ in runs if rows > 2048]


def test_nothing_is_searched_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found(monkeypatch, {4: 0.5}, capturing=True) == ([DEFAULT], [])
    assert not plans._ALGORITHMS  # the next call may search


# -- why not -------------------------------------------------------------------------------------------------------


class _Library:
    def __init__(self, *version: int) -> None:
        self.version = version


def _why(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = INT8,
    *,
    capability: tuple[int, int] = (9, 0),
    version: tuple[int, int, int] = (0, 8, 0),
    pattern: str = "6:8",
    slid: bool = True,
) -> str | None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(api, "load_library", lambda: _Library(*version))
    monkeypatch.setattr(cusparselt, "device_index", lambda device: 0)
    monkeypatch.setattr(cusparselt, "handle_of", lambda device: None)
    return get_backend("cusparselt").why_not(Problem(Pattern.parse(pattern), dtype, 64, 64, torch.device("cuda"), slid))


def test_gpus_run_what_they_have_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (INT8, FP8, torch.bfloat16):
        assert _why(monkeypatch, dtype) is None
        assert _why(monkeypatch, dtype, version=(0, 10, 0)) is None
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (11, 0), (12, 0), (12, 1), (13, 0)):  # listed, and a later one
        assert _why(monkeypatch, INT8, capability=capability, version=(0, 10, 0)) is None
    for dtype in (FP8, torch.bfloat16, torch.float16):
        assert _why(monkeypatch, dtype, capability=(10, 3), version=(0, 10, 0)) is None
    assert _why(monkeypatch, torch.float16, capability=(8, 0)) is None
    assert _why(monkeypatch, torch.float16, version=(0, 9, 1)) is None
    assert _why(monkeypatch, FP8, capability=(8, 9)) is None
    assert _why(monkeypatch, pattern="4:6") is None


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"capability": (7, 5)}, "compute capability 7.5 has no Sparse Tensor Cores"),
        ({"dtype": FP8, "capability": (8, 6)}, "FP8 needs compute capability 8.9, this GPU has .* 8.6"),
        ({"dtype": torch.float32}, "no fp32 kernels"),
        ({"capability": (10, 3)}, "no int8 kernels for compute capability 10.3; use fp8"),
        ({"dtype": torch.float16}, "FP16 kernels of cuSPARSELt 0.8 fail on Hopper"),
        ({"pattern": "dense"}, "no 2:4 form"),
        ({"slid": False}, "no 2:4 form"),
    ],
)
def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, problem: dict[str, object], reason: str) -> None:
    why = _why(monkeypatch, **problem)
    assert why is not None
    assert re.search(reason, why)
    assert "\n" not in why


def test_a_cpu_is_refused() -> None:
    problem = Problem(Pattern(6, 8), INT8, 64, 64, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"backend cusparselt cannot run.*it needs a CUDA device"):
        choose(problem, "cusparselt")
    assert "cusparselt: it needs a CUDA device" in choose(problem).reason


# -- the library ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _unloaded() -> Iterator[None]:
    api.load_library.cache_clear()
    yield
    api.load_library.cache_clear()


@pytest.mark.usefixtures("_unloaded")
def test_a_missing_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BACKENDS, "hopper")
    monkeypatch.setattr(ctypes, "CDLL", _cannot_open)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    problem = Problem(Pattern(6, 8), INT8, 64, 64, torch.device("cuda"))
    why = get_backend("cusparselt").why_not(problem)
    assert why == "libcusparseLt.so.0 is missing; pip install nvidia-cusparselt-cu13"
    assert choose(problem, fallback="none").backends == ("reference",)
    assert choose(problem).backends == ("dense",)
    with pytest.raises(UnsupportedError, match=r"backend cusparselt cannot run this layer: libcusparseLt\.so\.0"):
        choose(problem, "cusparselt")


def _cannot_open(name: str, mode: int = 0) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.usefixtures("_unloaded")
def test_too_old_a_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_open", object)
    monkeypatch.setattr(api, "Library", lambda _: SimpleNamespace(version=(0, 7, 1), version_text="0.7.1"))
    with pytest.raises(UnsupportedError, match=r"cuSPARSELt is too old; got 0\.7\.1"):
        api.load_library()


def _wheel_file(name: str) -> str:
    for wheel in api.WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == name:
                return str(file.locate())
    pytest.skip("no wheel of cuSPARSELt is installed")


@pytest.fixture
def header() -> str:
    with open(_wheel_file("cusparseLt.h"), encoding="utf-8") as file:
        return re.sub(r"//[^\n]*", "", file.read())


def test_structures_fit(header: str) -> None:
    sizes = re.findall(r"struct \{ alignas\((\d+)\) uint8_t data\[(\d+)\]; \}", header)
    assert len(sizes) == 5
    assert all(
        int(alignment) <= api.STRUCTURE_ALIGNMENT and int(size) <= api.STRUCTURE_BYTES for alignment, size in sizes
    )


C_TYPES = {f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int64", "uint32", "int32")}
C_TYPES["size_t"] = ctypes.c_size_t
"""By-value parameters of the header; every other one is an enumeration, an int in C. A cudaStream_t is a pointer."""


def test_signatures_are_the_headers(header: str) -> None:
    for name, ours in api._SIGNATURES.items():
        found = re.search(rf"cusparseStatus_t CUSPARSELT_API\s+{name}\((.*?)\);", header, re.DOTALL)
        assert found
        parameters = [" ".join(parameter.split()) for parameter in found[1].split(",")]
        for parameter, argument in zip(parameters, ours, strict=True):
            if "*" in parameter or parameter.startswith("cudaStream_t"):
                assert ctypes.sizeof(argument) == ctypes.sizeof(ctypes.c_void_p), (name, parameter)
                assert argument is ctypes.c_void_p or hasattr(argument, "_type_"), (name, parameter)
            else:
                assert argument is C_TYPES.get(parameter.split()[0], ctypes.c_int), (name, parameter)


@pytest.mark.parametrize(
    ("enumerator", "value"),
    [
        ("CUSPARSELT_SPARSITY_50_PERCENT", api.SPARSITY_50_PERCENT),
        ("CUSPARSELT_MATMUL_ALG_DEFAULT", api.ALG_DEFAULT),
        ("CUSPARSE_COMPUTE_32I", api.COMPUTE_TYPES[INT8]),
        ("CUSPARSE_COMPUTE_32F", api.COMPUTE_TYPES[FP8]),
    ],
)
def test_enumerators_are_the_headers(header: str, enumerator: str, value: int) -> None:
    body = next(
        body for body in re.findall(r"enum \{(.*?)\}", header, re.DOTALL) if re.search(rf"\b{enumerator}\b", body)
    )
    counter = -1
    for entry in filter(None, (part.strip() for part in body.split(","))):
        name, _, explicit = (part.strip() for part in entry.partition("="))
        counter = int(explicit) if explicit else counter + 1
        if name == enumerator:
            assert value == counter
            return
    pytest.fail(f"{enumerator} not found")


@pytest.mark.usefixtures("_unloaded")
def test_the_wheels_library_loads_and_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel_file(api.SONAME)
    library = api.load_library()
    assert library.version >= api.OLDEST
    with pytest.raises(UnsupportedError, match=r"somewhere of cuSPARSELt [\d.]+ failed; got invalid value \(3\)"):
        library.check(3, "somewhere")


def test_structures_are_aligned_and_stay() -> None:
    structures = [api.Structure() for _ in range(20)]
    addresses = [structure.address for structure in structures]
    assert all(address % api.STRUCTURE_ALIGNMENT == 0 for address in addresses)
    assert min(b - a for a, b in zip(sorted(addresses), sorted(addresses)[1:], strict=False)) >= api.STRUCTURE_BYTES
