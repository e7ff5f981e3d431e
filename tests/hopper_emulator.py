"""What the Hopper kernel's tensor instructions would read of its operands, element by element.

Written from the PTX ISA (``wgmma.mma_async.sp``: register fragments of the metadata; matrix descriptors: swizzling),
not from the packer, with which it shares no code: loops over rows, threads and instructions, as the hardware has them.
A GPU test compares both with the kernel itself.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

ROWS, SLAB = 64, 128
LEGAL = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE}
TYPES = {1: np.uint8, 2: np.uint16}


def swizzled(address: int, row_bytes: int) -> int:
    """Address in shared memory of a byte of an operand whose rows of 64 or 128 bytes are swizzled."""
    if row_bytes == 128:  # bits 4-6 ^= bits 7-9
        return address ^ (address >> 7 & 7) << 4
    return address ^ (address >> 7 & 3) << 4  # 64: bits 4-5 ^= bits 7-8


def read_row(memory: np.ndarray, row: int, row_bytes: int) -> np.ndarray:
    """The bytes of a row, in order."""
    starts = [swizzled(row * row_bytes + chunk, row_bytes) for chunk in range(0, row_bytes, 16)]
    return np.concatenate([memory[start : start + 16] for start in starts])


def dense_block(memory: np.ndarray) -> np.ndarray:
    """A step of a row block of a dense weight of six bits, as the matrix that multiplies: [64, 128] of bit patterns.

    Registers have the rows and columns of the kept values of 2:4 (PTX ISA, register fragments of m64nNk32).
    """
    halves = [widened(with_metadata(half))[:4096] for half in memory.reshape(2, 3072)]
    return np.concatenate([[read_row(half, row, 64) for row in range(ROWS)] for half in halves], 1)


def sparse_block(memory: np.ndarray, itemsize: int) -> np.ndarray:
    """A 2:4 step of a row block, as the matrix that multiplies: [64, 128 / itemsize] of bit patterns."""
    if itemsize == 1 and len(memory) == 4096:
        memory = widened(memory)
    values = [read_row(memory[:4096], row, 64).view(TYPES[itemsize]) for row in range(ROWS)]
    columns = SLAB // itemsize
    matrix = np.zeros((ROWS, columns), TYPES[itemsize])
    for instruction in range(2):
        for row in range(ROWS):
            for window in range(columns // 8):  # windows of four columns of this instruction
                nibble = metadata(memory[4096:], row, window, instruction, itemsize)
                assert nibble in LEGAL, f"metadata {nibble:#x} at row {row}"
                at = instruction * columns // 2 + window * 4
                kept = at // 2
                matrix[row, at + (nibble & 3)] = values[row][kept]
                matrix[row, at + (nibble >> 2)] = values[row][kept + 1]
    return matrix


def widened(memory: np.ndarray) -> np.ndarray:
    """A 2:4 step of values of six bits, as one of eight: of each instruction and thread three words, and metadata.

    The thread gives four registers to the instruction: kept values 4 * (lane % 4) and those 16 later, of row lane / 4
    and of the row 8 below. Byte for byte, words 0 and 1 have the upper nibbles of two registers, word 2 the next two
    bits of all four.
    """
    step = np.zeros(5120, np.uint8)
    for instruction, thread in np.ndindex(2, 128):
        warp, lane = divmod(thread, 32)
        words = memory[(instruction * 128 + thread) * 16 :][:16].tolist()
        for register, two_bits in enumerate((2, 0, 4, 6)):
            row = warp * 16 + lane // 4 + register % 2 * 8
            first = instruction * 32 + register // 2 * 16 + lane % 4 * 4
            for byte in range(4):
                nibble = words[register // 2 * 4 + byte] >> (0 if register % 2 else 4) & 15
                step[swizzled(row * 64 + first + byte, 64)] = nibble << 4 | (words[8 + byte] >> two_bits & 3) << 2
        metadata_at = 4096 + (instruction * 128 + thread) * 4
        step[metadata_at : metadata_at + 4] = words[12:]
    return step


def with_metadata(values: np.ndarray) -> np.ndarray:
    """The values of six bits of a step in a bundle, where third words lie apart, as they stand with metadata."""
    step = np.zeros((2, 128, 16), np.uint8)
    for instruction, own in enumerate(values.reshape(2, 1536)):
        step[instruction, :, :8] = own[:1024].reshape(128, 8)
        step[instruction, :, 8:12] = own[1024:].reshape(128, 4)
    return step.reshape(-1)


def metadata(memory: np.ndarray, row: int, window: int, instruction: int, itemsize: int) -> int:
    """The four bits that say where a window's two values stand, from the register of the thread that holds them."""
    warp, row_in_warp = divmod(row, 16)
    lane = row_in_warp % 8 * 4
    if itemsize == 1:  # 16 windows: lane bit 0 is rows +8, lane bit 1 the second eight windows; all lanes take part
        lane += row_in_warp // 8 + window // 8 * 2
        register, shift = memory[instruction * 512 :], window % 8 * 4
    else:  # 8 windows: lane bit 0 is the second four, lane bit 1 the sparsity selector; rows +8 in the upper half
        lane += window // 4 + instruction * 2
        register, shift = memory, window % 4 * 4 + row_in_warp // 8 * 16
    thread = warp * 32 + lane
    word = int(register[thread * 4 : thread * 4 + 4].view("<u4")[0])
    return word >> shift & 15


def bundle_block(words: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """A bundle of a row block, as the matrix that multiplies: [64, 128 * steps] of bit patterns.

    ``steps`` [steps, 4096] are its values. ``words`` are the bits of two counts for each of 32 groups of a row, plane
    by plane: how many entries were kept before each of the two positions that were left out.
    """
    if steps.shape[1] == 3072:
        steps = np.stack([widened(with_metadata(step))[:4096] for step in steps])
    windows, planes = len(steps), of_threads(words)
    matrix = np.zeros((ROWS, SLAB * windows), np.uint8)
    values = [[read_row(step, row, 64).tolist() for row in range(ROWS)] for step in steps]
    for row in range(ROWS):
        for place in range(32):
            index = indices(*(count(planes, row, place, which) for which in range(2)), 2 * windows)
            for entry, (window, within) in enumerate(index):
                assert window == entry // 2
                matrix[row, SLAB * window + 4 * place + within] = values[window][row][2 * place + entry % 2]
    return matrix


def of_threads(words: np.ndarray) -> list[list[int]]:
    """The words of the 128 threads, plane by plane."""
    planes: list[list[int]] = words.copy().view("<u4").reshape(-1, 128).tolist()
    return planes


def count(planes: list[list[int]], row: int, place: int, which: int) -> int:
    """One of the two counts of the group at a place of its slab, from the words of the thread that needs it there."""
    instruction, within = divmod(place, 16)
    half, nibble = divmod(within, 8)
    warp, row_in_warp = divmod(row, 16)
    thread = warp * 32 + row_in_warp % 8 * 4 + row_in_warp // 8 + half * 2
    bit = 4 * nibble + 2 * instruction + which
    return sum((plane[thread] >> bit & 1) << weight for weight, plane in enumerate(planes))


@lru_cache
def indices(first: int, second: int, entries: int) -> list[tuple[int, int]]:
    """The window of every kept entry of a group, and its place there, 0 to 3, by walking over the group."""
    assert first <= second <= entries
    found, position = [], 0
    for entry in range(entries):
        position += (entry == first) + (entry == second)
        window = entry // 2
        assert 0 <= position - 2 * window <= 3
        found.append((window, position - 2 * window))
        position += 1
    return found


def weights(steps: np.ndarray, itemsize: int) -> np.ndarray:
    """A weight as the matrix [rows, K'] that multiplies, rows padded to tiles.

    It is in steps, or in bundles: of each row tile the words of its four row blocks, then its steps.
    """
    tiles = []
    for tile in steps:
        for block in range(4):
            if steps.ndim == 4:
                decoded = dense_block if steps.shape[3] == 6144 else partial(sparse_block, itemsize=itemsize)
                blocks = [decoded(step[block]) for step in tile]
            else:
                blocks = [bundle_block(*of_block(bundle, block)) for bundle in tile]
            tiles.append(np.concatenate(blocks, 1))
    return np.concatenate(tiles)


def of_block(bundle: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The words and the steps of a row block in the bytes of a bundle."""
    sizes = {
        4 * (field * 512 + windows * size): (field, size)
        for windows in range(2, 8)
        for field in (3 + (windows > 3),)
        for size in (4096, 3072)
    }
    field, size = sizes[len(bundle)]
    words = 4 * 512 * field
    return bundle[:words].reshape(4, -1)[block], bundle[words:].reshape(-1, 4, size)[:, block]


def activations(slabs: np.ndarray, itemsize: int) -> np.ndarray:
    """Slabs uint8 [slabs, tokens, 128] as [tokens, K'] of bit patterns."""
    tokens = [
        np.concatenate([read_row(slab.reshape(-1), row, SLAB).view(TYPES[itemsize]) for slab in slabs])
        for row in range(slabs.shape[1])
    ]
    return np.stack(tokens)
