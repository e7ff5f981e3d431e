"""The files of measured times: what is read, what is written, and what is wrong with them."""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from slidesparse import InputError
from slidesparse.base import log
from slidesparse.base.whole_file import replace_file
from slidesparse.gemm import speed_files
from slidesparse.gemm.speed import Installation, LayerSpeed, SpeedTable, WrongForm
from slidesparse.gemm.speed_files import add_layers, load_speeds, table_of, tuned_path

TOKENS = (64, 1024, 16384)
LIBRARIES = {"dense": "torch 2.11", "quick": "Quick 1.0"}
HERE = Installation("Test GPU", "9.9", "580.1", LIBRARIES)


def _layer(out: int = 4096, tokens: tuple[int, ...] = TOKENS, **us: tuple[float | None, ...]) -> LayerSpeed:
    return LayerSpeed("int8", out, 4096, tokens, us)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed_files, "_UNWRITTEN", {})
    log.log_once.cache_clear()
    return tmp_path / "cache/slidesparse"


def test_a_table_is_read_as_it_was_written(cache: Path) -> None:
    layer = _layer(dense=(1.0, 2.5, 3.0), **{"quick 6:8": (0.5, None, 0.25)})
    assert load_speeds(tuned_path(HERE)) is None
    path = add_layers(HERE, [layer])
    assert path == tuned_path(HERE)
    assert path.parent == cache
    assert load_speeds(path) == SpeedTable(HERE, (layer,))


def test_times_of_a_comparison_are_joined_with_older_ones_and_the_newest_come_last() -> None:
    first, other = _layer(dense=(1.0,) * 3, quick=(2.0,) * 3), _layer(8, dense=(1.0,) * 3)
    again = _layer(tokens=(1024, 4096), dense=(7.0, 8.0), quick=(5.0, 6.0))
    more = _layer(dense=(3.0,) * 3, slow=(4.0,) * 3)  # another comparison: its dense is its own
    for layers in ([first, other], [again, more]):
        path = add_layers(HERE, layers)
    table = load_speeds(path)
    assert table is not None
    joined = _layer(tokens=(64, 1024, 4096, 16384), dense=(1.0, 7.0, 8.0, 1.0), quick=(2.0, 5.0, 6.0, 2.0))
    assert table.layers == (other, joined, more)


def test_wrong_forms_are_kept_once() -> None:
    wrong = WrongForm("int8", 4096, 4096, "quick 6:8")
    for _ in range(2):
        path = add_layers(HERE, [_layer(dense=(1.0,) * 3)], [wrong])
    assert path is not None
    assert load_speeds(path) == SpeedTable(HERE, (_layer(dense=(1.0,) * 3),), (wrong,))


def test_each_installation_has_a_file_of_its_own(cache: Path) -> None:
    newer = replace(HERE, libraries={**LIBRARIES, "quick": "Quick 2.0"})
    others = [newer, replace(HERE, driver="590.1"), replace(HERE, driver=None), replace(HERE, gpu="Test-GPU")]
    for number, installation in enumerate((HERE, *others)):
        assert table_of(installation) == SpeedTable(installation)
        add_layers(installation, [_layer(8 + number, dense=(1.0,) * 3)])
    assert len(list(cache.glob("*.json"))) == 5
    assert [layer.out for layer in table_of(newer).layers] == [9]


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_one_warning_and_is_written_anew(caplog: pytest.LogCaptureFixture) -> None:
    path = tuned_path(HERE)
    path.write_text("{")
    for _ in range(3):
        assert table_of(HERE).layers == ()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "these times are not used: damaged" in warning.getMessage()
    assert "\n" not in warning.getMessage()
    add_layers(HERE, [_layer(dense=(1.0,) * 3)])
    assert len(table_of(HERE).layers) == 1


def test_what_the_disk_refuses_is_kept_by_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: str | bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(speed_files, "replace_file", full)
    layer, more = _layer(dense=(1.0,) * 3), _layer(8, dense=(1.0,) * 3)
    assert add_layers(HERE, [layer]) is None
    assert add_layers(HERE, [more]) is None
    assert table_of(HERE).layers == (layer, more)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert (
        "the times measured here cannot be kept, so the next start measures again: No space left on device"
        in warnings[0]
    )
    monkeypatch.setattr(speed_files, "replace_file", replace_file)
    assert add_layers(HERE, []) == tuned_path(HERE)
    assert table_of(HERE).layers == (layer, more)


def test_a_file_that_another_process_wrote_is_read_again() -> None:
    path = add_layers(HERE, [_layer(dense=(1.0,) * 3)])
    assert path is not None
    before = load_speeds(path)
    other = path.with_suffix(".other")
    other.write_text(path.read_text().replace("1.0", "2.0"))
    other.replace(path)
    assert load_speeds(path) != before


GOOD = {
    "installation": {"gpu": "Test GPU", "capability": "9.9", "driver": None, "libraries": {}},
    "layers": [
        {"dtype": "int8", "out": 8, "columns": 8, "tokens": [1, 2], "experts": None, "us": {"dense": [1.0, None]}}
    ],
    "wrong": [],
}

EXPERTS = {"count": 4, "everywhere": 8, "top_k": 2, "down": None, "bits": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"layers": [{**GOOD["layers"][0], "experts": EXPERTS | {"top_k": 0}}]}, "at least 1"),
        ({"layers": [{**GOOD["layers"][0], "experts": EXPERTS | {"down": "3:5"}}]}, "pattern"),
        ({"layers": [{**GOOD["layers"][0], "tokens": [2, 1]}]}, "ascending"),
        ({"layers": [{**GOOD["layers"][0], "out": 0}]}, "sizes"),
        ({"layers": [{**GOOD["layers"][0], "us": {"dense": [1.0, 0.0]}}]}, "times of dense"),
        ({"wrong": [{"dtype": "int8", "out": 8, "columns": 8, "experts": None}]}, "table.wrong[0] lacks name"),
    ],
)
def test_a_damaged_table_is_one_clear_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InputError, match=r"damaged .*bad\.json") as error:
        load_speeds(path)
    assert message in str(error.value)
    assert str(error.value).count("; got ") <= 1
