"""The emulator of PTX itself: each instruction of the kernels for ``mma.sync``, against arithmetic by the PTX ISA.

Fragments are built element by element by the formulas of "Matrix Fragments for mma", and metadata by its figures.
"""

from __future__ import annotations

import pytest
import torch
from ptx_emulator.compiled import compile_program
from ptx_emulator.machine import Machine
from ptx_emulator.state import POISON, Fault, GlobalMemory

INT8, FP8, BF16, FP16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16
NAMES = {INT8: "s8", FP8: "e4m3", BF16: "bf16", FP16: "f16"}
PAIRS = torch.tensor([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])


def run(source: str, *tensors: torch.Tensor, threads: int = 32, grid: int | tuple[int, ...] = 1, shared: int = 0,
        cluster: int = 1, arch: int = 80) -> None:  # fmt: skip
    """Run a kernel whose parameters are pointers to tensors."""
    memory = GlobalMemory()
    pointers = torch.tensor([memory.add(tensor) for tensor in tensors]).numpy().tobytes()
    program = compile_program({"kernel.cu": source}, [f"--gpu-architecture=compute_{arch}", "--std=c++17"])
    Machine(program, pointers, memory, threads=threads, shared_bytes=shared, grid=grid, cluster=cluster).run()


def kernel(body: str, parameters: str) -> str:
    return (
        f'extern __shared__ __align__(16) unsigned char smem[];\nextern "C" __global__ void kernel({parameters}) {{\n'
        f"const unsigned t = threadIdx.x, base = (unsigned)__cvta_generic_to_shared(smem);\n{body}\n}}"
    )


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-128, 128, shape).to(INT8) if dtype == INT8 else torch.randn(shape).to(dtype)


def words(elements: list[torch.Tensor]) -> torch.Tensor:
    """Return what 32 lanes hold, int32 [32, registers], of element i of all lanes."""
    return torch.stack(elements, 1).contiguous().view(torch.uint8).view(torch.int32)


def sparse_rows(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random 2:4 rows with these kept values, and their metadata [rows, windows] of four bits."""
    rows, count = kept.shape
    places = PAIRS[torch.randint(0, 6, (rows, count // 2))]
    dense = torch.zeros(rows, count // 2, 4, dtype=torch.float64)
    dense.scatter_(2, places, kept.double().view(rows, count // 2, 2))
    return dense.flatten(1), places[..., 0] | places[..., 1] << 2


def metadata_words(nibbles: torch.Tensor, wide: bool, selector: int) -> torch.Tensor:
    """Return the metadata registers of 32 lanes; lanes that the selector leaves out have random bits."""
    found = []
    for lane in range(32):
        group, part = lane // 4, lane % 4
        if not wide:  # PTX ISA, figures of m16n8k64
            chosen = nibbles[group + 8 * (part & 1), 8 * (part >> 1) :][:8].tolist()
        elif part // 2 == selector:  # PTX ISA, figure of m16n8k32
            start = 4 * (part & 1)
            chosen = [*nibbles[group, start : start + 4].tolist(), *nibbles[group + 8, start : start + 4].tolist()]
        else:
            chosen = torch.randint(0, 16, (8,)).tolist()
        found.append(sum(nibble << 4 * i for i, nibble in enumerate(chosen)))
    return torch.tensor(found).to(torch.int32)


@pytest.mark.parametrize(
    ("dtype", "selector"),
    [(d, s) for d in NAMES for s in ((None, 0) if d.itemsize == 1 else (None, 0, 1))],
)
def test_mma_multiplies_fragments(dtype: torch.dtype, selector: int | None) -> None:
    torch.manual_seed(0)
    sparse, total = selector is not None, "s32" if dtype == INT8 else "f32"
    each, registers = 4 // dtype.itemsize, 4 if sparse else 2
    a = random(16, 4 * 2 * each, dtype=dtype)
    b = random(8, 4 * registers * each, dtype=dtype)
    c = torch.randint(-(10**6), 10**6, (16, 8), dtype=torch.int32) if dtype == INT8 else torch.randn(16, 8)
    dense, nibbles = sparse_rows(a) if sparse else (a.double(), torch.zeros(16, 16))
    group, member = torch.arange(32) // 4, torch.arange(32) % 4
    a_words = words(
        [
            a[group + 8 * (i // each % 2), member * each + i % each + 4 * each * (i // (2 * each))]
            for i in range(4 * each)
        ]
    )
    b_words = words([b[group, member * each + i % each + 4 * each * (i // each)] for i in range(registers * each)])
    c_at = [(group + 8 * (i // 2), member * 2 + i % 2) for i in range(4)]
    e_words = metadata_words(nibbles, dtype.itemsize == 2, selector or 0) if sparse else torch.zeros(32).int()
    d, c_words = torch.zeros(32, 4, dtype=c.dtype), words([c[at] for at in c_at])
    sp, shape = ("sp::ordered_metadata.", 2 * 8 * each) if sparse else ("", 8 * each)
    b_names = "{%8,%9,%10,%11}" if sparse else "{%8,%9}"
    last = f",%16,{selector}" if sparse else ""
    body = f"""
    const uint4 av = a[t], cv = c[t]; uint4 bv = {{}}, dv;
    bv.x = b[t * {registers}]; bv.y = b[t * {registers} + 1];
    if ({registers} == 4) {{ bv.z = b[t * 4 + 2]; bv.w = b[t * 4 + 3]; }}
    asm volatile("mma.{sp}sync.aligned.m16n8k{shape}.row.col.{total}.{NAMES[dtype]}.{NAMES[dtype]}.{total} "
        "{{%0,%1,%2,%3}},{{%4,%5,%6,%7}},{b_names},{{%12,%13,%14,%15}}{last};"
        : "=r"(dv.x), "=r"(dv.y), "=r"(dv.z), "=r"(dv.w) : "r"(av.x), "r"(av.y), "r"(av.z), "r"(av.w),
          "r"(bv.x), "r"(bv.y), "r"(bv.z), "r"(bv.w), "r"(cv.x), "r"(cv.y), "r"(cv.z), "r"(cv.w), "r"(e[t]));
    d[t] = dv;"""
    parameters = "const uint4* a, const unsigned* b, const uint4* c, const unsigned* e, uint4* d"
    run(kernel(body, parameters), a_words, b_words, c_words, e_words, d, arch=89)
    exact = dense @ b.double().T + c.double()
    torch.testing.assert_close(d, torch.stack([exact[at] for at in c_at], 1).to(c.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_lane_two_elements_of_a_row(count: int, trans: bool) -> None:
    torch.manual_seed(count)
    stored = torch.randint(-(2**15), 2**15, (64, 8), dtype=torch.int16)
    rows, found = torch.randperm(64)[:32], torch.zeros(32, 4, dtype=torch.int32)
    outputs, operands = (",".join(form % i for i in range(count)) for form in ("%%%d", '"=r"(v[%d])'))
    body = f"""
    ((uint4*)smem)[t] = stored[t]; ((uint4*)smem)[t + 32] = stored[t + 32];
    __syncthreads();
    unsigned v[4] = {{}}, at = t < {8 * count} ? base + 16 * rows[t] : 7;
    asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{".trans" * trans}.shared.b16 {{{outputs}}}, [%{count}];"
        : {operands} : "r"(at));
    found[t] = uint4{{v[0], v[1], v[2], v[3]}};"""
    run(kernel(body, "const uint4* stored, const int* rows, uint4* found"), stored, rows.int(), found, shared=1024)
    matrices, lane = stored[rows].view(4, 8, 8), torch.arange(32)
    for i, matrix in enumerate(matrices[:count]):
        matrix = matrix.T if trans else matrix
        expected = torch.stack([matrix[lane // 4, lane % 4 * 2 + j] for j in (0, 1)], 1)
        assert torch.equal(found[:, i].contiguous().view(torch.int16).view(32, 2), expected)


COPIES = """
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(base + 16 * t), "l"(x + 4 * t));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(base + 512 + 8 * t), "l"(x + 2 * t), "r"(sizes[t]));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(base + 768 + 4 * t), "l"(x + t));
    for (int wait = 0; wait < 4; wait++) {
        if (wait == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
        if (wait == 2) asm volatile("cp.async.wait_group 0;" ::: "memory");
        if (wait == 3) asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        for (int i = 0; i < 28; i++) found[wait * 896 + i * 32 + t] = smem[i * 32 + t];
    }"""


def copy(edit: tuple[str, str] = ("", ""), size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, sizes = torch.randint(-(2**31), 2**31, (128,), dtype=torch.int32), torch.randint(0, size + 1, (32,)).int()
    found = torch.zeros(4, 896, dtype=torch.uint8)
    body = COPIES.replace(*edit)
    run(kernel(body, "const int* x, const int* sizes, unsigned char* found"), x, sizes, found, shared=896)
    return found, x.view(torch.uint8), sizes


def test_a_copy_ends_when_its_thread_waits_for_it_and_fills_with_zeros() -> None:
    found, x, sizes = copy()
    parts = x, torch.where(torch.arange(8) < sizes[:, None], x[:256].view(32, 8), 0).view(-1), x[:128]
    for wait, one in enumerate(found):
        for number, (got, right) in enumerate(zip(one.split([512, 256, 128]), parts, strict=True)):
            assert torch.equal(got, right if wait > number else torch.full_like(got, POISON))


@pytest.mark.parametrize(
    ("edit", "size", "message"),
    [
        (("cp.async.wait_all", "cp.async.wait_group 0"), 8, "on their way"),
        (("16 * t", "16 * t + 8"), 8, "no multiples of 16"),
        (("x + 4 * t", "x + 4 * t + 4"), 8, "global access"),
        (("base + 768", "base + 776"), 8, "shared access"),
        (("", ""), 9, "more than that"),
    ],
)
def test_a_wrong_copy_is_found(edit: tuple[str, str], size: int, message: str) -> None:
    with pytest.raises(Fault, match=message):
        copy(edit, size)


def test_arithmetic_on_parts_of_registers() -> None:
    torch.manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (32, 3), dtype=torch.int32)
    found = torch.zeros(9, 32, dtype=torch.int32)
    asm = "\n".join(
        f'asm volatile("{text}" : "=r"(v) : "r"(a), "r"(b), "r"(c)); found[{i} * 32 + t] = v;'
        for i, text in enumerate(
            (
                "prmt.b32 %0, %1, %2, %3;",
                "dp4a.s32.s32 %0, %1, %2, %3;",
                "lop3.b32 %0, %1, %2, %3, 0xD8;",
                "bfe.s32 %0, %1, 5, 9;",
                "bfe.u32 %0, %1, 28, 9;",
                "shf.l.wrap.b32 %0, %1, %2, %3;",
                "shf.r.wrap.b32 %0, %1, %2, %3;",
                "popc.b32 %0, %1;",
                "{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, low}; }",
            )
        )
    )
    run(
        kernel(f"int a = x[3 * t], b = x[3 * t + 1], c = x[3 * t + 2], v;\n{asm}", "const int* x, int* found"), x, found
    )
    for lane, (a, b, c) in enumerate(x.tolist()):
        bytes_of_both = [number >> 8 * i & 255 for number in (a, b) for i in range(4)]
        signed = [[(number >> 8 * i & 255 ^ 128) - 128 for i in range(4)] for number in (a, b)]
        chosen = [(c >> 4 * i & 15, bytes_of_both[c >> 4 * i & 7]) for i in range(4)]
        low, both = a % 2**32, (b % 2**32) << 32 | a % 2**32
        expected = [
            sum((byte if nibble < 8 else 255 * (byte > 127)) << 8 * i for i, (nibble, byte) in enumerate(chosen)),
            c + sum(p * q for p, q in zip(*signed, strict=True)),
            sum((0xD8 >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)),
            (low >> 5 & 511 ^ 256) - 256,
            low >> 28,
            both << (c & 31) >> 32,
            both >> (c & 31),
            low.bit_count(),
            low >> 16 | low << 16,
        ]
        assert [number % 2**32 for number in found[:, lane].tolist()] == [number % 2**32 for number in expected]


def test_shuffles_read_other_lanes_of_a_segment() -> None:
    x, found = torch.randint(-(2**31), 2**31, (32,), dtype=torch.int32), torch.zeros(4, 32, dtype=torch.int32)
    body = """
    found[t] = __shfl_sync(-1u, x[t], 3 * t); found[32 + t] = __shfl_xor_sync(-1u, x[t], 5, 8);
    found[64 + t] = __shfl_down_sync(-1u, x[t], 3, 16); found[96 + t] = __shfl_up_sync(-1u, x[t], 3, 16);"""
    run(kernel(body, "const int* x, int* found"), x, found)
    lane = torch.arange(32)
    down, up = lane + 3 * (lane % 16 < 13), lane - 3 * (lane % 16 >= 3)
    assert torch.equal(found, x[torch.stack([3 * lane % 32, lane ^ 5, down, up])])


def test_blocks_add_to_the_same_numbers() -> None:
    x, found = torch.randint(-(2**31), 2**31, (6, 64), dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    body = """
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    asm volatile("red.global.add.s32 [%0], %1;" :: "l"(found + t % 8), "r"(x[block * 64 + t]));
    __syncthreads();
    if (t == 0) ((int*)smem)[0] = atomicAdd(found + 8, 1);"""
    run(kernel(body, "const int* x, int* found"), x, found, threads=64, grid=(3, 2), cluster=6, shared=4)
    assert torch.equal(found, torch.cat([x.view(-1, 8).sum(0).int(), torch.tensor([6]).int()]))
