"""The file in which ``slidesparse plan`` keeps its measurements, line by line, so that a killed run goes on there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slidesparse.base.typed_json import decode, parse_json
from slidesparse.base.whole_file import require_regular
from slidesparse.errors import CheckpointError, InputError, SlideSparseError, first_line
from slidesparse.models.sensitivity import Sensitivity


def sensitivity_file(out: Path) -> Path:
    """Return the path of a plan's measurements: ``plan.json`` -> ``plan.sensitivities.jsonl``."""
    return out.with_suffix(".sensitivities.jsonl")


class SensitivityFile:
    """Measurements in a file that grows line by line; the first line names the model, the text and the method.

    The weights are compared and not their path, so a file stays valid for a model that was moved or copied. A file
    without a measurement is begun anew: there is nothing in it to lose.

    Raises:
        CheckpointError: The file holds something else, or measurements of another model, text or method.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.damages: dict[tuple[str, str], float] = {}
        # A killed run may leave half a line, the only one without its end.
        lines = _read(path).split("\n")[:-1] if os.path.lexists(path) else []
        try:
            found, *measured = [parse_json(line, f"line {i}") for i, line in enumerate(lines, 1)] or [{}]
            read = decode(tuple[Sensitivity, ...], measured, "measurements")
        except InputError as error:
            raise CheckpointError(f"{path} is damaged", got=str(error), remedy="remove it") from error
        self.damages = {(one.names[0], one.pattern): one.damage for one in read}
        same = isinstance(found, dict) and {**found, "model": about["model"]} == json.loads(json.dumps(about))
        if measured and not same:
            raise CheckpointError(
                f"{path} was measured on another model, text or method", remedy="remove it, or choose another --out"
            )
        path.write_text("\n".join([*(lines if measured else [json.dumps(about)]), ""]), encoding="utf-8")

    def add(self, found: Sensitivity) -> None:
        """Append a measurement, unless the file has it."""
        key = (found.names[0], found.pattern)
        if key not in self.damages:
            self.damages[key] = found.damage
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")


def _read(path: Path) -> str:
    try:
        require_regular(path)
        return path.read_text(encoding="utf-8")
    except SlideSparseError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", got=error.strerror, remedy="remove it") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged", got=first_line(error), remedy="remove it") from error
