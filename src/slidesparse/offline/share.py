"""Times that this machine measured, in a file for others.

The file is a table like all others (:mod:`slidesparse.gemm.speed_files`): the names of the GPU, its driver and the
libraries, sizes, and times. It says nothing else about the machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slidesparse.base.device import require_cuda
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError
from slidesparse.gemm.expert_times import as_linear
from slidesparse.gemm.select import installation
from slidesparse.gemm.speed import LayerSpeed, SpeedTable
from slidesparse.gemm.speed_files import load_speeds, table_text, tuned_path
from slidesparse.gemm.time_model import explain


def write(path: Path) -> SpeedTable:
    """Write the times measured here into a file, and return them; forms that were wrong have none.

    Raises:
        InputError: There are none, or the file is there already.
        UnsupportedError: There is no CUDA device.
    """
    require_cuda("slidesparse tune --share")
    here = installation()
    table = load_speeds(tuned_path(here))
    if table is None:
        raise InputError(
            f"nothing was measured on this {here.gpu} with this driver and these libraries",
            remedy="run slidesparse tune ./MODEL first",
        )
    if path.exists():
        raise InputError(f"{path} is there already", remedy="name another file, or delete it")
    shared = replace(table, wrong=())  # a wrong result concerns this machine alone
    replace_file(path, table_text(shared))
    return shared


def describe(table: SpeedTable, path: Path) -> str:
    """Return what a file holds, for people."""
    there = table.installation
    libraries = ", ".join(there.libraries.values())
    lines = [f"{there.gpu}, compute capability {there.capability}, driver {there.driver}, {libraries}"]
    lines += [f"{layer_name(layer)}: {explain(as_linear(layer)[1])}" for layer in table.layers]
    return "\n".join([*lines, f"{path}: these lines are all that it says about this machine"])


def layer_name(layer: LayerSpeed) -> str:
    """Return ``int8 4096x4096``, or ``int8 1536x2048, 128 experts, 8 a token``."""
    prefix, _ = as_linear(layer)
    return f"{layer.dtype} {layer.out}x{layer.columns}" + (f", {prefix[:-2]}" if prefix else "")
