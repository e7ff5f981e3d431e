"""What the driver is told of a launch: our struct, cuda-bindings' own, a driver that listens."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse import InputError, UnsupportedError
from slidesparse.gemm import kernel as kernels
from slidesparse.gemm import launch
from slidesparse.gemm.hopper import tiles as hopper_tiles
from slidesparse.gemm.hopper.choose_tiles import choose_for
from slidesparse.gemm.hopper.compile import sources
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.kernel import Arguments, Kernel, load_kernel
from slidesparse.gemm.launch import WeightAddresses, find_launch
from slidesparse.gemm.steps import StepForm
from slidesparse.lifting.layout import ColumnOrder

driver = pytest.importorskip("cuda.bindings.driver")

PLAIN = Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4)
SPLIT = Tile(tokens=64, warpgroups=1, row_blocks=1, stages=7, split=2, blocks=2)
SMALL = Tile(tokens=16, warpgroups=1, row_blocks=1, stages=9, blocks=3)
STREAM = 4096


class Listener:
    """``answers`` are the status of one launch after another."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.launches, self.contexts = list(answers), [], []
        structs = ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchAttributeValue", "CUlaunchConfig")
        self.driver = SimpleNamespace(
            cuLaunchKernelEx=self.launch, cuCtxSetCurrent=self.set_context, **{n: getattr(driver, n) for n in structs}
        )

    def launch(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        assert parameters
        assert extra == 0
        self.launches.append((config, function))
        return (self.answers.pop(0) if self.answers else 0,)

    def set_context(self, context: Any) -> tuple[int]:
        self.contexts.append(context)
        return (0,)


@pytest.fixture(autouse=True)
def _h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    multiprocessors = kernels.multiprocessors
    multiprocessors.cache_clear()
    yield
    multiprocessors.cache_clear()


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*answers: int) -> Listener:
        listener = Listener(*answers)
        monkeypatch.setattr(kernels, "_driver", lambda: listener.driver)
        return listener

    return start


def kernel(tile: Tile) -> Kernel:
    return Kernel("function", "context", tile, tile.shared_bytes(1), multiprocessors=132)


@pytest.mark.parametrize(("tile", "tiles", "grid"), [(PLAIN, 7, 7), (SMALL, 1000, 396), (SPLIT, 500, 1000)])
def test_a_launch_may_start_before_the_kernel_before_it_has_ended(
    listen: Any, tile: Tile, tiles: int, grid: int
) -> None:
    listener, loaded = listen(), kernel(tile)
    loaded.launch(Arguments(), loaded.grid(tiles), STREAM)
    ((config, function),) = listener.launches
    assert function == "function"
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (grid, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (tile.threads, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (tile.shared_bytes(1), STREAM)
    (attribute,) = config.attrs[: config.numAttrs]
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_thread_without_a_context_gets_the_kernels(listen: Any) -> None:
    listener = listen(int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT))
    kernel(PLAIN).launch(Arguments(), 7, STREAM)
    assert listener.contexts == ["context"]
    assert len(listener.launches) == 2


def test_a_launch_that_fails_says_so(listen: Any) -> None:
    listen(700)
    with pytest.raises(UnsupportedError):
        kernel(PLAIN).launch(Arguments(), 7, STREAM)


# -- the arguments of the kernel -----------------------------------------------------------------------------------


def fields_of_the_source() -> list[tuple[str, str]]:
    """Name and C type of each field of the kernel's struct, as the source has them."""
    source = re.sub(r"//.*", "", sources()["arguments.cuh"])
    (body,) = re.findall(r"struct Arguments \{(.*?)\n\};", source, re.DOTALL)
    declared = [statement.split() for statement in body.split(";") if statement.strip()]
    assert all(re.fullmatch(r"\w+", words[-1]) for words in declared), "one plain name a declaration"
    return [(words[-1], " ".join(words[:-1])) for words in declared]


def test_the_struct_has_the_fields_of_the_source_in_their_order() -> None:
    fields, offset = fields_of_the_source(), 0
    assert [name for name, _ in fields] == [name for name, _ in Arguments._fields_]
    for name, written in fields:
        kind = ctypes.c_void_p if written.endswith("*") else {"int": ctypes.c_int}[written]
        size = ctypes.sizeof(kind)
        offset += -offset % size  # as C aligns it
        field = getattr(Arguments, name)
        assert dict(Arguments._fields_)[name] is kind, name
        assert (field.offset, field.size) == (offset, size), name
        offset += size
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    assert ctypes.sizeof(Arguments) == offset + -offset % 8


ORDER = ColumnOrder(192, 8, 0, 24, 384, slid=True)
"""Three slabs."""
BUNDLED = ColumnOrder(512, 8, 0, 64, 768, slid=True, bundle=32)
"""Two bundles of three slabs."""

OUT = 300


def shapes(order: ColumnOrder, itemsize: int, out: int) -> tuple[StepForm, torch.Size]:
    """The form of a weight, and the shape of its tensor."""
    form = StepForm.of_order(order, itemsize)
    return form, form.shape(out, itemsize)


def test_sizes_that_do_not_fit_are_refused_before_a_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_kernel", lambda *_: pytest.fail("loaded"))
    form, steps = shapes(ORDER, 1, OUT)
    x, rest = torch.Size((70, ORDER.k_packed)), (OUT, torch.bfloat16, 0, choose_for)
    for activations, operand, out in (
        (torch.Size((70, ORDER.k_packed - 128)), (form, steps), OUT),
        (x, (form, steps), 513),
        (x, (form._replace(value_bits=6), steps), OUT),
        (torch.Size((70, BUNDLED.k_packed - 128)), shapes(BUNDLED, 1, OUT), OUT),
        (torch.Size((70, BUNDLED.k_packed + 128)), shapes(BUNDLED, 1, OUT), OUT),
    ):
        with pytest.raises(InputError):
            find_launch(activations, torch.int8, *operand, out, *rest[1:])
    with pytest.raises(InputError):
        find_launch(x, torch.int8, form, steps, OUT, torch.float64, 0, choose_for)


def test_where_there_is_nothing_to_compute_no_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_kernel", lambda *_: pytest.fail("loaded"))
    x, types = torch.Size((70, ORDER.k_packed)), (torch.bfloat16, 0, choose_for)
    no_tokens = find_launch(torch.Size((0, ORDER.k_packed)), torch.int8, *shapes(ORDER, 1, OUT), OUT, *types)
    no_outputs = find_launch(x, torch.int8, *shapes(ORDER, 1, 0), 0, *types)
    for nothing in (no_tokens, no_outputs, no_outputs.for_tokens(900)):
        assert not nothing.bands
        nothing.launch(1, 2, WeightAddresses(4, None, None, 0), 8)


# -- loading -------------------------------------------------------------------------------------------------------

CALLS = "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that keeps its calls, and answers each with what it was given, and an object."""
    told = SimpleNamespace(calls=[], status={})

    def call(name: str) -> Any:
        made = () if name in ("cuCtxSetCurrent", "cuFuncSetAttribute") else (f"of {name}",)
        return lambda *given: told.calls.append((name, *given)) or (told.status.get(name, 0), *made)

    named = {name: call(name) for name in CALLS} | {"CUfunction_attribute": driver.CUfunction_attribute}
    monkeypatch.setattr(kernels, "_driver", lambda: SimpleNamespace(**named))
    monkeypatch.setattr(hopper_tiles, "cubin", lambda *given: given)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132 + index)
    )
    return told


VARIANT = SMALL, torch.int8, torch.bfloat16, 1, 3, 8
"""A tile, the types, a device, and the bits of a count and of a value."""


def test_a_variant_is_loaded_with_the_memory_that_it_needs(loading: Any) -> None:
    loaded, shared = load_kernel.__wrapped__(*VARIANT, False), SMALL.shared_bytes(1, 3)
    retain, current, load, find, attribute = loading.calls
    assert (retain, current) == (("cuDevicePrimaryCtxRetain", 1), ("cuCtxSetCurrent", "of cuDevicePrimaryCtxRetain"))
    assert load == ("cuModuleLoadData", (SMALL, torch.int8, torch.bfloat16, False, 3, 8))
    assert find == ("cuModuleGetFunction", "of cuModuleLoadData", b"sparse_gemm")
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert attribute == ("cuFuncSetAttribute", "of cuModuleGetFunction", most, shared)
    assert (loaded.function, loaded.context, loaded.tile) == ("of cuModuleGetFunction", current[1], SMALL)
    assert (loaded.shared_bytes, loaded.multiprocessors) == (shared, 133)


@pytest.mark.parametrize("name", CALLS)
def test_a_variant_that_cannot_be_loaded_says_which_call_failed(loading: Any, name: str) -> None:
    loading.status[name] = 2
    with pytest.raises(UnsupportedError, match=f"{name} failed; got 2"):
        load_kernel.__wrapped__(*VARIANT, False)
    assert loading.calls[-1][0] == name


def test_nothing_is_loaded_while_a_graph_is_captured(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError):
        load_kernel(*VARIANT, False)
    assert not loading.calls


def test_a_driver_has_the_major_version_of_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [(0, 13020), (100, 0)]
    monkeypatch.setattr(kernels, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=lambda: answers.pop(0)))
    version = kernels.driver_version.__wrapped__
    assert version() == 13
    with pytest.raises(UnsupportedError):
        version()


@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_warm_up_loads_is_loaded_for_launches(loading: Any, grouped: bool) -> None:
    given = PLAIN, torch.int8, torch.bfloat16, 99, 3, 8, grouped  # a device that no other test has
    try:
        kernels.load_kernels([PLAIN], *given[1:-1], grouped=grouped)
        load_kernel(*given)
        loads = [code for name, *code in loading.calls if name == "cuModuleLoadData"]
        assert loads == [[(PLAIN, torch.int8, torch.bfloat16, grouped, 3, 8)]]
    finally:
        load_kernel.cache_clear()
