"""Compile every variant of the kernels for one compute capability and report what became of it.

    python compile_kernels.py 90

Needs no GPU. Prints one JSON object: variant -> registers, stack bytes (spills), the widths of its global accesses, how
many shuffles and approximate divisions it has, and for two variants the widths in bits of stores to shared memory and
the number of instructions. Runs as a program of its own, since a process with Triton's interpreter on cannot compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slidesparse.lifting.expert_lift_kernel import routed_kernel, spread_kernel
from slidesparse.lifting.launch import configure, make_variant
from slidesparse.lifting.layout import ColumnOrder, Layout, LiftSpec, Slabs
from slidesparse.lifting.resident import resident_kernel
from slidesparse.lifting.walking import walking_kernel
from slidesparse.weights.pack_kernel import MAGNITUDE, PackVariant, pack_kernel
from slidesparse.weights.packed import pack_by
from slidesparse.weights.quant import QUANTISED
from slidesparse.weights.support import INT_VIEW

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
}
BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn


def build(
    kernel: object,
    arguments: dict[str, object],
    arch: int,
    num_warps: int,
    registers: int | None = None,
    disassemble: bool = False,
) -> dict[str, object]:
    """Compile.

    Args:
        kernel: A ``triton.jit`` function.
        arguments: Name -> Triton type of a run-time argument (``*`` pointers and ``stride`` ones aligned to 16), or a
            one-element tuple around a constant.
        arch: Compute capability.
        num_warps: Warps of a program.
        registers: Most registers of a lane.
        disassemble: Also read the machine code.
    """
    names = list(arguments)
    constants = {(i,): value[0] for i, value in enumerate(arguments.values()) if isinstance(value, tuple)}
    signature = {name: "constexpr" if isinstance(value, tuple) else value for name, value in arguments.items()}
    aligned = [n for n, t in signature.items() if t.startswith("*") or (n.endswith("_stride") and t != "constexpr")]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps, "maxnreg": registers}
    )
    code = machine_code(compiled.asm["cubin"]) if disassemble else {}
    return resources(compiled.asm["cubin"]) | accesses(compiled.asm["ptx"]) | code


def tool(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, object]:
    usage = tool(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    return {"registers": int(found[1]), "stack": int(found[2]), "local": int(found[4])}


def machine_code(cubin: bytes) -> dict[str, object]:
    """What ptxas made of the stores to shared memory, which the PTX does not tell. Takes a second."""
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"
    codes = re.findall(line, tool(cubin, "-sass"), re.MULTILINE)
    stores = [re.search(r"(8|16|64|128)$", code) for code in codes if code.startswith("STS")]
    widths = Counter(store[1] if store else "32" for store in stores)
    return {"shared_stores": widths, "instructions": sum(code != "NOP" for code in codes)}


def accesses(ptx: str) -> dict[str, object]:
    widths = {what: Counter(re.findall(rf"{what}\.global\.\S*?((?:v\d\.)?b\d+)", ptx)) for what in ("ld", "st")}
    return {**widths, "shuffles": ptx.count("shfl.sync"), "approximate_divisions": ptx.count("div.full.f32")}


def order(pattern: str, columns: int, multiple: int) -> ColumnOrder:
    return ColumnOrder.of(pack_by(torch.zeros(1, columns, dtype=INT8), pattern), multiple)


def lift_variants(arch: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Pattern, K, source, target, prologue, slabs, and the quantiser unless it is vLLM's."""
    types = [INT8] + ([FP8] if arch >= 89 else [])
    cases = [(p, 4096, BF16, t, "none", None) for p in ("4:6", "6:8", "8:10", "14:16") for t in types]
    cases += [(p, 2048, BF16, INT8, "none", None) for p in ("6:8", "4:6")]
    cases += [("6:8", 8192, BF16, t, "silu_mul", None) for t in types]
    cases += [(p, 18944, BF16, types[-1], prologue, None) for p in ("6:8", "4:6") for prologue in ("none", "silu_mul")]
    cases += [
        ("6:8", 40960, BF16, types[-1], prologue, None) for prologue in ("none", "silu_mul")
    ]  # too long to be held
    norms = "rms_norm", "add_rms_norm", "add_gemma_norm"
    cases += [("6:8", 4096, BF16, types[-1], prologue, None) for prologue in norms]
    cases += [("6:8", 4096, source, types[-1], "none", None) for source in (FP16, FP32)]
    cases += [("6:8", 4096, source, source, "none", None) for source in (BF16, FP32)]
    cases += [(p, 4096, BF16, INT8, "none", Slabs()) for p in ("6:8", "4:6")]
    cases += [("6:8", k, BF16, t, "none", None, "sglang") for k in (4096, 40960) for t in types]  # held, and walked
    for pattern, columns, source, target, prologue, slabs, *quantiser in cases:
        packed = order(pattern, columns, 128)
        launch = configure(4096, packed, source.itemsize, prologue, target in QUANTISED)
        spec = LiftSpec(prologue, source, target, tuple(packed.numbers), Layout(slabs=slabs), *quantiser)
        variant = make_variant(spec, launch, early=arch >= 90)
        pointer = f"*{NAMES[source]}"
        added = variant.adds
        arguments = {
            "x_ptr": pointer,
            "residual_ptr": pointer if added else (None,),
            "residual_out_ptr": pointer if added else (None,),
            "norm_weight_ptr": pointer if "norm" in prologue else (None,),
            "out_ptr": pointer if variant.quant == "none" else "*i16" if variant.resident else "*i8",
            "scales_ptr": "*fp32",
            "tokens": "i32",
            "x_stride": "i32",
            "residual_stride": "i32" if added else (0,),
            "eps": "fp32",
            "P": (variant,),
        }
        label = f"{pattern} {columns} {NAMES[source]}->{target} {prologue}{' slabs' if slabs else ''} {launch}"
        label += "".join(f" {name}'s" for name in quantiser)
        yield (
            label,
            build(
                resident_kernel if variant.resident else walking_kernel,
                arguments,
                arch,
                launch.num_warps,
                launch.registers or None,
                disassemble=variant.resident
                and pattern == "6:8"
                and prologue == "none"
                and (columns > 8192 or source == FP32),
            ),
        )


def routed_variants(arch: int) -> Iterator[tuple[str, dict[str, object]]]:
    """The lifts of a layer of Qwen3-30B-A3B."""
    for name, columns, prologue, kernel, constant in (
        ("by row", 2048, "none", routed_kernel, ("GATHER", (True,))),
        ("by row", 768, "silu_mul", routed_kernel, ("GATHER", (False,))),
        ("by token", 2048, "none", spread_kernel, ("COPIES", (8,))),
    ):
        packed = order("6:8", columns, 128)
        launch = configure(4096, packed, BF16.itemsize, prologue)
        spec = LiftSpec(prologue, BF16, INT8, tuple(packed.numbers), Layout(slabs=Slabs()))
        variant = make_variant(spec, launch, early=arch >= 90)
        arguments = {
            "x_ptr": "*bf16",
            "to_ptr" if kernel is spread_kernel else "tokens_ptr": "*i64",
            "out_ptr": "*i16",
            "scales_ptr": "*fp32",
            "rows": "i32",
            "x_stride": "i32",
            constant[0]: constant[1],
            "P": (variant,),
        }
        built = build(kernel, arguments, arch, launch.num_warps, launch.registers or None)
        built["ld"] = {width: count for width, count in built["ld"].items() if "b64" not in width}  # rows and tokens
        built["st"]["b32"] //= 8 if kernel is spread_kernel else 1  # scales of eight rows
        yield f"routed {name} {columns} {prologue}", built


def pack_variants(arch: int) -> Iterator[tuple[str, dict[str, object]]]:
    for dtype, (magnitude, non_finite) in MAGNITUDE.items():
        variant = PackVariant(8192, 8, 0, 1024, magnitude, non_finite, checked=False, padded_group=8)
        pointer = f"*{NAMES[INT_VIEW[dtype]]}"
        for label, values, code in (("pack", pointer, "*u8"), ("pack: check", (None,), (None,))):
            arguments = {
                "weight": pointer,
                "values": values,
                "code": code,
                "faults": "*i32",
                "row_stride": "i32",
                "P": (variant,),
            }
            yield f"{label} {dtype}", build(pack_kernel, arguments, arch, 4)


if __name__ == "__main__":
    arch = int(sys.argv[1])
    print(json.dumps(dict(lift_variants(arch)) | dict(routed_variants(arch)) | dict(pack_variants(arch))))
