"""The options of text to calibrate and to train on, and their reading."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slidesparse.cli.arguments import Options, add_no_bos
from slidesparse.errors import InputError

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks
    from slidesparse.offline.calibrate.calibration import Calibration

PROMPTS = "(default: general ones, which are made; some like your users' are better)"

WINDOWS = ("samples", "length", "seed")
"""Options of calibration windows. Each is None unless it is given, so that unused ones can be refused;
:class:`slidesparse.offline.calibrate.calibration.Calibration` has the defaults."""


def add_calibration(parser: Options, text: str) -> None:
    """Add the options of calibration text for :func:`calibration_of`; ``text`` is the help."""
    add_texts(parser, "calibration", f"{text}; may be given again, with weights")
    add_own_chats(parser, "the model")
    add_no_bos(parser)
    parser.add_argument("--samples", type=int, help="calibration windows (default: 128)")
    text = "tokens of a calibration window (default: 2048, 512 of the default text, or what the model can read)"
    parser.add_argument("--length", type=int, help=text)
    parser.add_argument("--seed", type=int, help="seed of the choice of windows (default: 0)")


def add_texts(parser: Options, name: str, text: str) -> None:
    """Add an option for files of text, each with an optional weight."""
    parser.add_argument(f"--{name}", action="append", default=[], metavar="FILE[:WEIGHT]", help=text)


def add_own_chats(parser: Options, model: str) -> None:
    """Add the options of chats that a model writes itself, for :func:`own_chats_of`."""
    text = f"generate N chats with {model}, and read them too (kept, and reused)"
    parser.add_argument("--self-chats", type=int, metavar="N", dest="own_chats", help=text)
    parser.add_argument("--prompts", metavar="FILE", help=f"prompts for --self-chats {PROMPTS}")


def planned_chats(options: argparse.Namespace) -> list[str]:
    """Return a stand-in for the file of :func:`own_chats_of`, to check options with."""
    if options.own_chats is None and options.prompts is not None:
        raise InputError("options without effect", got="--prompts without --self-chats", needed="--self-chats N")
    return ["own chats"] if options.own_chats else []


def own_chats_of(options: argparse.Namespace, model: Path, device: str, ranks: Ranks) -> list[str]:
    """Let a model write the chats of the options, and return their file; none where there are none."""
    if options.own_chats is None:
        return []
    from slidesparse.recovery.own_chats import ChatOptions, kept_chats

    return [str(kept_chats(model, ChatOptions(options.own_chats, options.prompts), device, ranks))]


def calibration_of(options: argparse.Namespace, own: Sequence[str] = ()) -> Calibration | None:
    """Return the calibration of the options with the model's own chats; None for magnitude."""
    from slidesparse.offline.calibrate.calibration import calibration_for

    given = {name: getattr(options, name) for name in WINDOWS} | {"bos": False if options.no_bos else None}
    windows = {name: value for name, value in given.items() if value is not None}
    return calibration_for(options.method, [*options.calibration, *own], windows)
