"""The releases of vLLM that the plugin is tested with, for code, CI and the test of the pages."""

from __future__ import annotations

import re

TESTED = ("0.22.1", "0.26.0", "0.33.0")
"""Releases whose Python runs the plugin's tests in CI, oldest first. An older release is refused, and a newer one used
with a warning. ``docs/serving.md`` lists those that ran on a GPU."""


def parse_version(text: str) -> tuple[int, int] | None:
    """Read release and feature number; None for a build whose version lacks them.

    >>> parse_version("0.33rc1"), parse_version("0.22.1+cu130")
    ((0, 33), (0, 22))

    A build from a source tree without tags is ``0.1.dev`` and the number of a commit, whatever its age:

    >>> parse_version("0.1.dev123+g0a1b2c3") is None
    True
    """
    match = re.match(r"(\d+)\.(\d+)(?!\d|\.dev)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def is_older(text: str) -> bool:
    """Return whether a version of vLLM is certainly older than all tested ones.

    >>> is_older("0.21.0"), is_older("0.22.0"), is_older("0.1.dev123+g0a1b2c3")
    (True, False, False)
    """
    version = parse_version(text)
    return version is not None and version < _feature(TESTED[0])


def is_newer(text: str) -> bool:
    """Return whether a version of vLLM is newer than all tested ones, or may be.

    >>> is_newer("0.33.1"), is_newer("0.34.0rc1"), is_newer("0.1.dev123+g0a1b2c3")
    (False, True, True)
    """
    version = parse_version(text)
    return version is None or version > _feature(TESTED[-1])


def describe_tested() -> str:
    """Return the tested range in words: ``0.22 to 0.33``."""
    return " to ".join(".".join(map(str, _feature(version))) for version in (TESTED[0], TESTED[-1]))


def _feature(release: str) -> tuple[int, int]:
    version = parse_version(release)
    assert version is not None
    return version
