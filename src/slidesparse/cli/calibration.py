"""The options of text to calibrate and to train on, and their reading."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slidesparse.cli.arguments import Options, add_no_bos

if TYPE_CHECKING:
    from slidesparse.offline.calibrate.calibration import Calibration

PROMPTS = "(default: general ones, which are made; some like your users' are better)"

WINDOWS = ("samples", "length", "seed")
"""Options of calibration windows. Each is None unless it is given, so that unused ones can be refused;
:class:`slidesparse.offline.calibrate.calibration.Calibration` has the defaults."""


def add_calibration(parser: Options, text: str) -> None:
    """Add the options of calibration text for :func:`calibration_of`; ``text`` is the help."""
    add_texts(parser, "calibration", f"{text}; may be given again, with weights")
    add_no_bos(parser)
    parser.add_argument("--samples", type=int, help="calibration windows (default: 128)")
    text = "tokens of a calibration window (default: 2048, 512 of the default text, or what the model can read)"
    parser.add_argument("--length", type=int, help=text)
    parser.add_argument("--seed", type=int, help="seed of the choice of windows (default: 0)")


def add_texts(parser: Options, name: str, text: str) -> None:
    """Add an option for files of text, each with an optional weight."""
    parser.add_argument(f"--{name}", action="append", default=[], metavar="FILE[:WEIGHT]", help=text)


def calibration_of(options: argparse.Namespace) -> Calibration | None:
    """Return the calibration of the options; None for magnitude."""
    from slidesparse.offline.calibrate.calibration import calibration_for

    given = {name: getattr(options, name) for name in WINDOWS} | {"bos": False if options.no_bos else None}
    windows = {name: value for name, value in given.items() if value is not None}
    return calibration_for(options.method, options.calibration, windows)
