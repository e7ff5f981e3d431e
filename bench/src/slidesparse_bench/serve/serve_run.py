"""The state of a run of ``bench serve``: what its file holds, what engines have still to serve, and for how long."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from slidesparse_bench.records import DENSE_VARIANT, Machine, open_records
from slidesparse_bench.serve.serve_load import MIXED
from slidesparse_bench.serve.serve_profile import ServeProfile
from slidesparse_bench.served_records import SOAK, STOCK, EngineKey, ServeRecord, Way, Workload, to_line

FIRST_GUESS_S = 150.0
"""What an engine takes without a soak, before one has."""


@dataclass
class ServeRun:
    """One run: what was measured before, and where what comes goes.

    Attributes:
        profile: What is measured.
        path: The records file.
        scratch: Where checkpoints lie.
        machine: Where it runs.
        started: On the clock of time.monotonic.
        way: How engines are asked.
        found: The file's records.
        failed: Engines that died in this run, and why.
        added: How many records this run wrote.
        longest_s: What the slowest engine of this run took.
    """

    profile: ServeProfile
    path: Path
    scratch: Path
    machine: Machine
    started: float
    way: Way
    found: list[ServeRecord]
    failed: dict[str, str] = field(default_factory=dict)
    added: int = 0
    longest_s: float = 0.0

    def write(self, record: ServeRecord) -> None:
        """Add a record to the file."""
        with open_records(self.path, "a") as file:
            file.write(to_line(record) + "\n")
        self.added += 1
        self.found.append(record)

    def missing(self, key: EngineKey) -> list[Workload]:
        """What an engine has still to serve: nothing once it died."""
        mine = [record for record in self.found if record.key == key and record.way == self.way]
        if any(record.died for record in mine):
            return []
        done = [record.workload for record in mine]
        return [workload for workload in self.profile.workloads if workload not in done]

    def guess_s(self, key: EngineKey) -> float:
        """What an engine takes, by a guess."""
        return FIRST_GUESS_S + sum(workload.seconds for workload in self.missing(key) if workload.kind == SOAK)

    def spent(self, key: EngineKey) -> bool:
        """Whether an engine would end after the budget."""
        if self.profile.budget_s is None:
            return False
        return time.monotonic() - self.started + (self.longest_s or self.guess_s(key)) > self.profile.budget_s

    def of_stock(self, key: EngineKey) -> list[ServeRecord]:
        """What became of the stock engine of an engine's model and type."""
        stock = dataclasses.replace(key, engine=STOCK, pattern=DENSE_VARIANT, backend="", graphs=None)
        return [record for record in self.found if record.key == stock and record.way == self.way]

    def saturation(self, key: EngineKey) -> float | None:
        """Requests a second that stock took of the mixed load."""
        taken = [one.seconds for one in self.of_stock(key) if one.workload == MIXED and one.why_not is None]
        return MIXED.requests / statistics.median(taken[-1]) if taken else None

    def stock_comes(self, first: EngineKey) -> bool:
        """Whether the first engine is stock, and will serve the mixed load."""
        return first.engine == STOCK and MIXED in self.missing(first)

    def stock_counts(self, first: EngineKey) -> bool:
        """Whether stock's saturation is known, or will be, or its death is a record already."""
        if self.stock_comes(first) or self.saturation(first) is not None:
            return True
        return any(record.died for record in self.of_stock(first))
