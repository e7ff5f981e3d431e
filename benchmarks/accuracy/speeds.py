"""How fast patterns are when they are served, over stock vLLM: read from the records of ``slidesparse bench serve``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

RECORDS = Path(__file__).parents[2] / "results/h200/serve"
ENGINES = {"control": "dense", "6:8": "6:8", "4:6": "4:6", "2:4": "2:4"}
"""Engine of the records -> pattern of all its layers; the control is the plugin with nothing pruned."""


def served_speeds(workload: str, dtype: str = "int8") -> dict[str, float]:
    """Pattern -> requests in a second over those of stock vLLM, both with weights of a type."""
    seconds: dict[str, list[float]] = {}
    records = (RECORDS / f"qwen2.5-7b-{dtype}.jsonl").read_text()
    for record in map(json.loads, records.splitlines()):
        if record["workload"]["name"] == workload and record["key"]["graphs"] is None and record["seconds"]:
            seconds.setdefault(record["key"]["engine"], []).append(mean(record["seconds"]))
    stock = mean(seconds["stock"] + seconds["stock again"])
    return {pattern: stock / mean(seconds[engine]) for engine, pattern in ENGINES.items()}
