"""Let the Hopper backend run a changed copy of its kernels: of the GEMM's CUDA source and of the lift's Triton source.

A variant is a list of texts and what replaces them, so that the product's source carries no dead options. While it is
*applied*, launches that are made load its kernels; a launch keeps them afterwards.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slidesparse.gemm.hopper import compile as hopper_compile
from slidesparse.gemm.hopper import kernel as hopper_kernel
from slidesparse.gemm.hopper import launch as hopper_launch
from slidesparse.gemm.hopper.compile import sources
from slidesparse.gemm.hopper.kernel import Kernel
from slidesparse.gemm.hopper.tiles import Tile

LIFTS = ("lift_math", "held", "walking")
"""Modules of the lift, each before those that import it."""

Edit = tuple[str, str, str]
"""A file, a text that stands in it once, and what replaces it."""


@dataclass(frozen=True)
class Variant:
    """A change of the kernels."""

    name: str
    idea: str
    predicted: float  # change of time in per cent; `variants` says of what
    count: str  # where the prediction comes from
    starts_early: bool = False  # which only launches in a row show
    edits: tuple[Edit, ...] = ()
    tiles: Mapping[str, Tile] = field(default_factory=dict, hash=False)  # in place of those that the product chooses
    only_these: bool = False  # there are no kernels for other tiles
    only_six_bits: bool = False  # nor for weights of eight bits, whose stages do not fit

    def tile(self, chosen: Tile) -> Tile:
        """Return the tile that runs in place of the product's choice."""
        return self.tiles.get(str(chosen), chosen)

    def takes(self, chosen: Tile, value_bits: int) -> bool:
        """Whether there is a kernel in place of this tile."""
        return (str(chosen) in self.tiles or not self.only_these) and (value_bits == 6 or not self.only_six_bits)


PRODUCT = Variant("product", "the kernel as it is", 0, "")


class Misfit(AssertionError):
    """The source has changed: a text that a variant replaces is not there once."""


def changed(edits: tuple[Edit, ...], file: str, text: str) -> str:
    """Return the text of a file after the edits of it."""
    for _, old, new in (edit for edit in edits if edit[0] == file):
        if text.count(old) != 1:
            raise Misfit(f"{file} has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    return text


def changed_sources(variant: Variant, count_bits: int = 0, value_bits: int = 8) -> dict[str, str]:
    """As :func:`slidesparse.gemm.hopper.compile.sources`, with the variant's edits."""
    return {name: changed(variant.edits, name, text) for name, text in sources(count_bits, value_bits).items()}


@cache
def load(variant: Variant, chosen: Tile, *types: object) -> Kernel:
    """As :func:`slidesparse.gemm.hopper.kernel.load_kernel`; the variant must be applied."""
    uncached: Callable[..., Kernel] = hopper_kernel.load_kernel.__wrapped__
    return uncached(variant.tile(chosen), *types)


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """Make launches load the variant's kernels."""
    from slidesparse.lifting import kernel as lift_kernel  # needs Triton

    lifts = changed_lifts(tuple(edit for edit in variant.edits if edit[0].removesuffix(".py") in LIFTS))
    with ExitStack() as stack:
        for module, name, value in (
            (hopper_compile, "sources", lambda *form: changed_sources(variant, *form)),
            (hopper_launch, "load_kernel", lambda tile, *types: load(variant, tile, *types)),
            *((lift_kernel, name, kernel) for name, kernel in lifts.items()),
        ):
            stack.enter_context(patch.object(module, name, value))
        for forget in (hopper_launch._launch.cache_clear, lift_kernel._launcher.cache_clear):
            forget()
            stack.callback(forget)
        yield


@cache
def changed_lifts(edits: tuple[Edit, ...]) -> dict[str, Any]:
    """Return the kernels of the lift after edits; Triton reads their source from files."""
    folder, package, found = Path(tempfile.mkdtemp()), "slidesparse.lifting", {}
    for name in LIFTS if edits else ():
        path, own = folder / f"{name}.py", f"{folder.name}_{name}"
        text = changed(edits, path.name, (Path(hopper_kernel.__file__).parents[2] / "lifting" / path.name).read_text())
        path.write_text(text.replace(f"from {package}.lift_math", f"from {folder.name}_lift_math"), encoding="utf-8")
        spec: Any = importlib.util.spec_from_file_location(own, path)
        sys.modules[own] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {kernel: value for kernel, value in vars(module).items() if kernel == f"{name}_kernel"}
    return found
