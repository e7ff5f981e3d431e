"""Predict the times of the kernel for `mma.sync` on cards that nobody has measured, from published rates.

    python benchmarks/predict_cards.py results/predicted-cards.jsonl
    python benchmarks/predict_cards.py --check results/h200/mma-sync.jsonl

A model of the kernel's loop, not a measurement. A step of a tile takes as long as the slowest of four: its
instructions, its bytes through shared memory (written once, and read by each warp that needs them), its bytes from L2,
and the time until a copy arrives, over the steps that are on their way. A launch takes the steps of the busiest
multiprocessor and its bytes from memory, which overlap in part. Tiles are those that the kernel would choose. What no
rate says is in :class:`Kernel`, fitted to an H200's dense and 2:4 products (docs/log/ampere-kernel.md).

Instruction rates are NVIDIA's (whitepapers of GA100, AD102 and GB202, datasheets of A100 and L40S); an H200's are ours.
What reads reach from memory and L2 was measured by others: te42kyfo/gpu-benches (A100 80GB, L40), and for an RTX 4090
smallscientist1/cuda_microbenchmark (L2, by cp.async) and xytpai/nvbench. Those of an RTX 5090 are scaled from the
4090's. FP8 is added up in float32, at half of the rate on GeForce cards.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slidesparse.gemm.ampere.tiles import Card as ChoiceCard
from slidesparse.gemm.ampere.tiles import choose_bands, fitting
from slidesparse.gemm.launch import Band
from slidesparse.gemm.steps import StepForm
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse_bench.known_models import LAYERS, MODELS

TOKENS = (16, 64, 256, 1024, 4096, 16384)
PATTERNS = ("6:8", "4:6", "2:4")
MODEL = "Qwen2.5-7B"
SIZES = dict(zip(LAYERS, MODELS[MODEL], strict=True))
SHARED_BYTES = 128
"""Bytes that a multiprocessor reads or writes of its shared memory in a clock."""


@dataclass(frozen=True)
class Card:
    """A GPU's rates.

    Attributes:
        name: Name on the page of cards.
        multiprocessors: Their number.
        mhz: Clock to which the instruction rates belong.
        tera: Type -> dense and sparse 10^12 operations a second, zeros counted.
        memory: GB a second that a kernel reads from memory.
        l2: The same from L2.
        shared: Most shared memory of a block, KiB.
    """

    name: str
    multiprocessors: int
    mhz: float
    tera: dict[str, tuple[float, float]]
    memory: float
    l2: float
    shared: int

    def per_clock(self, giga: float) -> float:
        """Return a multiprocessor's share in a clock of a rate of 10^9 a second."""
        return giga * 1e3 / (self.mhz * self.multiprocessors)

    @property
    def for_choice(self) -> ChoiceCard:
        """What decides on tiles."""
        return ChoiceCard(self.multiprocessors, self.shared * 1024, 2 if self.shared > 99 else 4)


H200 = Card("H200", 132, 1980, {"int8": (1289, 1899)}, 4100, 9800, 227)
CARDS = (
    Card("A100", 108, 1410, {"int8": (624, 1248)}, 1730, 5400, 163),
    Card("L40S", 142, 2520, {"int8": (733, 1466), "fp8": (733, 1466)}, 797, 5200, 99),
    Card("RTX 4090", 128, 2520, {"int8": (661, 1321), "fp8": (330, 661)}, 920, 4900, 99),
    Card("RTX 5090", 170, 2407, {"int8": (838, 1676), "fp8": (419, 838)}, 1640, 6500, 99),
)


@dataclass(frozen=True)
class Kernel:
    """What the rates do not say.

    Attributes:
        share: Share of the rate of instructions, and of shared memory, that a step reaches.
        memory: Rate of reads over that of a copy.
        start_us: A launch, with the fill of the first ring and the last stores.
        tile_clocks: Clocks of a tile of 128 x 256 outside its steps; of a small one half of it.
        latency_us: From a copy's start until its bytes are there, of a busy card.
        wait_clocks: Clocks of a step in which a team waits for its threads.
        unpack_clocks: Clocks of a multiprocessor to unpack a byte of six-bit weights.
        overlap: Exponent by which steps and memory overlap: 1 one after the other, infinite at once.
    """

    share: float = 0.767
    memory: float = 1.014
    start_us: float = 1.35
    tile_clocks: float = 4800
    latency_us: float = 1.41
    wait_clocks: float = 110
    unpack_clocks: float = 0.02
    overlap: float = 4


class Weight(NamedTuple):
    """A weight: its size, pattern or ``dense``, type, and bits of a value in memory."""

    out: int
    columns: int
    pattern: str
    dtype: str = "int8"
    bits: int = 8

    @property
    def dense(self) -> bool:
        """Whether it is not 2:4."""
        return Pattern.parse(self.pattern) == DENSE

    @property
    def steps(self) -> int:
        """Steps along a lifted row."""
        return math.ceil(self.columns * (1 if self.dense else Pattern.parse(self.pattern).expansion) / SLAB_BYTES)


def time_of(card: Card, weight: Weight, tokens: int, band: Band, kernel: Kernel) -> float:
    """Return the microseconds of a launch: steps, and bytes of weight, activations and results."""
    tile, x = band.tile, band.tile.tokens * SLAB_BYTES
    w = tile.stage_bytes(1, weight.bits) - x
    tiles = tile.count(tokens, band.channels)
    instructions = 2 * tile.channels * x / card.per_clock(card.tera[weight.dtype][not weight.dense] * 1e3)
    unpacked = kernel.unpack_clocks * w if weight.bits == 6 else 0
    shared = (w + x + tile.token_warps * w + tile.row_warps * x) / SHARED_BYTES
    l2 = (w + x) / card.per_clock(card.l2) * min(1, tiles / card.multiprocessors)  # idle ones leave theirs to others
    arrival = kernel.latency_us * card.mhz / ((tile.stages - 1) * tile.split)
    step = max(instructions / kernel.share + unpacked, shared / kernel.share, l2, arrival)
    step += kernel.wait_clocks / tile.split
    outside = kernel.tile_clocks * (1 + tile.channels * tile.tokens / (128 * 256)) / 2
    compute = math.ceil(tiles / card.multiprocessors) * (weight.steps * step + outside) / card.mhz
    moved = weight.steps * (band.channels * w / tile.channels + tokens * SLAB_BYTES) + 2 * tokens * band.channels
    memory = moved / (card.memory * 1e3 * kernel.memory)
    both = compute**kernel.overlap + memory**kernel.overlap
    return kernel.start_us + both ** (1 / kernel.overlap)


def predict(card: Card, weight: Weight, tokens: int, kernel: Kernel) -> float:
    """Return the microseconds of a product by the tiles that the kernel chooses."""
    form = StepForm(weight.steps, 0, weight.bits, weight.dense)
    bands = choose_bands(tokens, weight.out, form, 1, card.for_choice)
    return sum(time_of(card, weight, tokens, band, kernel) for band in bands)


def block(card: Card, pattern: str, dtype: str, bits: int, kernel: Kernel) -> list[float]:
    """Return the microseconds of a block's linears, one after the other, for all numbers of tokens."""
    weights = [Weight(*size, pattern, dtype, bits) for size in MODELS[MODEL]]
    return [sum(predict(card, weight, tokens, kernel) for weight in weights) for tokens in TOKENS]


def predictions(kernel: Kernel) -> Iterator[dict[str, Any]]:
    """Yield dense's time over each pattern's for every card, type and number of bits; dense has eight."""
    for card in CARDS:
        for dtype in card.tera:
            dense = block(card, "dense", dtype, 8, kernel)
            for bits in (8, 6) if dtype == "int8" else (8,):
                row = {"card": card.name, "dtype": dtype, "bits": bits, "dense_us": [round(us, 1) for us in dense]}
                for pattern in PATTERNS:
                    ours = block(card, pattern, dtype, bits, kernel)
                    row[pattern] = [round(one / other, 2) for one, other in zip(dense, ours, strict=True)]
                yield row


def check(path: Path, kernel: Kernel) -> None:
    """Print the predicted over the measured time of an H200's products by the chosen tiles, and the differences."""
    shares: dict[str, list[float]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row["section"] != "time" or "ampere" not in row["backend"] or row["source"] != "now":
            continue
        weight = Weight(*SIZES[row["layer"]], row["pattern"], bits=row["bits"])
        tiles = fitting(StepForm(weight.steps, 0, weight.bits, weight.dense), 1, H200.for_choice)
        band = Band(next(tile for tile in tiles if str(tile) == row["tile"]), weight.out)
        shares.setdefault(weight.pattern, []).append(time_of(H200, weight, row["tokens"], band, kernel) / row["us"])
        print(*weight, row["tokens"], band.tile, row["us"], f"{shares[weight.pattern][-1]:.2f}")
    for pattern, found in shares.items():
        off = [abs(share - 1) for share in found]
        near = sum(share <= 0.1 for share in off)
        print(f"{pattern}: {near} of {len(off)} within 10 %, median {statistics.median(off):.1%}, worst {max(off):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the record to write, or with --check a record of measured times")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    kernel = Kernel()
    if options.check:
        check(options.file, kernel)
        return
    head = {
        "what": __doc__.splitlines()[0],
        "model": MODEL,
        "tokens": TOKENS,
        "patterns": PATTERNS,
        "kernel": asdict(kernel),
    }
    lines = [head, *map(asdict, CARDS), *predictions(kernel)]
    options.file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
