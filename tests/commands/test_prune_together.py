"""Several processes prune one checkpoint: the same bytes, one line for an error, and kills that lose nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, contents, make_checkpoint, write_text
from rank_processes import Ended, run_ranks
from small_models import make

from slidesparse.cli import main

MAGNITUDE = ["--pattern", "6:8", "--method", "magnitude", "--device", "cpu"]


def calibrated(folder: Path, method: str = "sparsegpt", pattern: str = "6:8") -> list[str]:
    """Eight batches of 1024 tokens, which are few, as a line would say."""
    text = ["--calibration", str(folder / "text.txt"), "--samples", "256", "--length", "32", "--quiet"]
    return ["--pattern", pattern, "--dtype", "int8", "--device", "cpu", "--method", method, *text]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of nine shards, with a text."""
    folder = tmp_path_factory.mktemp("source")
    make_checkpoint(folder / "m", dtype=torch.float32, shard_size="60KB")
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt", 2000)
    return folder / "m"


@pytest.fixture(scope="module")
def alone(source: Path) -> Callable[[list[str]], dict[str, bytes]]:
    """What one process makes with some options."""
    made: dict[str, dict[str, bytes]] = {}

    def make(options: list[str]) -> dict[str, bytes]:
        name = str(len(made)) if " ".join(options) not in made else ""
        if name:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # as the processes have: sums depend on the number
            assert main(["prune", str(source), str(source.parent / name), "--quiet", *options]) == 0
            torch.set_num_threads(threads)
            made[" ".join(options)] = contents(source.parent / name)
        return made[" ".join(options)]

    return make


def prune(folder: Path, source: Path, world: int, options: list[str], before: Any = None) -> list[Ended]:
    return run_ranks(folder, world, ["prune", source, folder / "s", *options], before)


def values(text: str) -> Iterator[Any]:
    """The JSON values in a text, one after another."""
    while text.strip():
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
        text = text.lstrip()[end:]
        yield value


def lines(ended: list[Ended]) -> list[str]:
    return [line for one in ended for line in one.err.splitlines()]


def has_failed(ended: Ended) -> bool:
    """Whether a process ended by an error, its own or the loss of another process, or was terminated as others were."""
    return ended.status in (1, 143, -15)  # the last before it could handle the signal


# -- what comes out ------------------------------------------------------------------------------------------------


def test_magnitude_gives_the_bytes_of_one_process(
    tmp_path: Path, source: Path, alone: Callable[[list[str]], dict[str, bytes]]
) -> None:
    world = 4
    ended = prune(tmp_path, source, world, [*MAGNITUDE, "--json"])
    assert [(one.status, one.err) for one in ended] == [(0, "")] * world
    assert json.loads(ended[0].out)["destination"] == str(tmp_path / "s")
    assert [one.out for one in ended[1:]] == [""] * (world - 1)
    assert contents(tmp_path / "s") == alone(MAGNITUDE)
    assert not (tmp_path / "s.partial").exists()


@pytest.mark.parametrize(("world", "method", "pattern"), [(3, "sparsegpt", "6:8"), (2, "wanda", "4:6")])
def test_calibration_gives_the_bytes_of_one_process(
    tmp_path: Path, source: Path, world: int, method: str, pattern: str, alone: Callable[[list[str]], dict[str, bytes]]
) -> None:
    options = calibrated(source.parent, method, pattern) + (["--rounding", "6bit"] if world == 3 else [])
    ended = prune(tmp_path, source, world, options)
    assert [(one.status, one.err) for one in ended] == [(0, "")] * world
    assert "calibration loss" in ended[0].out
    assert contents(tmp_path / "s") == alone(options)


def test_experts_get_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Each process sees what is routed to an expert in its part of the text; some experts borrow from their layer."""
    make(tmp_path / "m", ARCHITECTURES["mixtral"], torch.float32)
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt", 2000)
    options = calibrated(tmp_path, "wanda")
    options[options.index("256")] = "64"  # two batches
    ended = prune(tmp_path, tmp_path / "m", 2, options)
    assert [(one.status, one.err) for one in ended] == [(0, "")] * 2
    assert "saw few tokens, and borrowed from their layer: 1 of the experts' weights" in ended[0].out
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["prune", str(tmp_path / "m"), str(tmp_path / "alone"), "--quiet", *options]) == 0
    torch.set_num_threads(threads)
    assert contents(tmp_path / "s") == contents(tmp_path / "alone")


# -- kills and restarts --------------------------------------------------------------------------------------------


def test_a_killed_process_loses_nothing(
    tmp_path: Path, source: Path, alone: Callable[[list[str]], dict[str, bytes]]
) -> None:
    """What each process has finished is taken over, by another number of processes too."""
    ended = prune(tmp_path, source, 2, MAGNITUDE, rank_processes.rank_1_is_killed_at_its_second_shard)
    assert has_failed(ended[0])
    assert ended[1].status == -9
    (line,) = lines(ended)
    assert "s.partial keeps" in line
    assert not (tmp_path / "s").exists()
    finished = {path.stem for path in (tmp_path / "s.partial/finished").iterdir()}
    assert 1 <= len(finished) <= 5  # one of the killed process, and up to four of the one that was then ended
    ended = prune(tmp_path, source, 4, [*MAGNITUDE, "--json"])
    assert {one.status for one in ended} == {0}
    assert set(json.loads(ended[0].out)["resumed"]) == finished
    assert contents(tmp_path / "s") == alone(MAGNITUDE)
    assert not list(tmp_path.glob("s.partial"))


def test_a_process_killed_in_calibration_loses_nothing(
    tmp_path: Path, source: Path, alone: Callable[[list[str]], dict[str, bytes]]
) -> None:
    options = calibrated(source.parent)
    ended = prune(tmp_path, source, 2, options, rank_processes.rank_1_is_killed_in_its_second_layer)
    assert has_failed(ended[0])
    assert ended[1].status == -9
    (line,) = lines(ended)
    assert "keeps 2 finished files" in line  # what is smoothed, and a layer
    assert "the same command goes on from there" in line
    assert not (tmp_path / "s.partial/failed").exists()  # another command does not replace the layer
    ended = prune(tmp_path, source, 4, options)
    assert {one.status for one in ended} == {0}
    assert contents(tmp_path / "s") == alone(options)


def test_a_signal_to_all_is_one_line(tmp_path: Path, source: Path) -> None:
    ended = prune(tmp_path, source, 2, MAGNITUDE, rank_processes.all_are_terminated_at_their_second_shard)
    assert [one.status for one in ended] == [143, 143]
    (line,) = lines(ended)
    assert line.startswith(f"slidesparse: terminated; {tmp_path}/s.partial keeps")


@pytest.mark.slow
def test_torchrun_starts_killed_processes_again(
    tmp_path: Path, source: Path, alone: Callable[[list[str]], dict[str, bytes]]
) -> None:
    (tmp_path / "run.py").write_text(
        "import os, rank_processes, sys\n"
        "from slidesparse.cli import main\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    rank_processes.rank_1_is_killed_at_its_second_shard(int(os.environ['RANK']))\n"
        "sys.exit(main())\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command = [sys.executable, *torchrun, str(tmp_path / "run.py"), "prune", str(source), str(tmp_path / "s"), "--json"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *MAGNITUDE], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    _, last = values(done.stdout)  # the first is the error of the attempt that was ended
    assert last["resumed"]
    assert contents(tmp_path / "s") == alone(MAGNITUDE)


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_error_that_all_have_is_one_line(tmp_path: Path, source: Path) -> None:
    (tmp_path / "s").mkdir()
    ended = prune(tmp_path, source, 4, [*MAGNITUDE, "--json"])
    assert all(map(has_failed, ended))
    (line,) = lines(ended)
    assert line == f"slidesparse: destination {tmp_path / 's'} exists; remove it or choose another name"
    (told,) = [one.out for one in ended if one.out]
    assert json.loads(told)["error"]["kind"] == "CheckpointError"


def test_an_error_of_one_process_ends_all_and_is_one_line(tmp_path: Path) -> None:
    """It is in the third shard of the second process, which has no lock; another command begins anew all the same."""
    model: Any = make_checkpoint(tmp_path / "m", dtype=torch.float32, shard_size="60KB")
    model.model.layers[1].mlp.gate_proj.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "m", max_shard_size="60KB")
    for pattern in ("6:8", "4:6"):
        ended = prune(tmp_path, tmp_path / "m", 2, [*MAGNITUDE, "--pattern", pattern, "--json"])
        assert all(map(has_failed, ended))
        (line,) = lines(ended)
        assert line.startswith("slidesparse: model.layers.1.mlp.gate_proj.weight holds NaN or Inf")
        assert "another one begins anew" in line
        assert ended[0].out == ""
        assert "holds NaN or Inf" in json.loads(ended[1].out)["error"]["message"]
        assert not (tmp_path / "s").exists()
        assert not list((tmp_path).rglob("*.tmp"))


def test_processes_with_other_options_are_refused(tmp_path: Path, source: Path) -> None:
    words = ["prune", source, tmp_path / "s", *MAGNITUDE, "--pattern"]
    ended = run_ranks(tmp_path, 2, [[*words, "6:8"], [*words, "4:6"]])
    assert all(map(has_failed, ended))
    (line,) = lines(ended)
    assert line.startswith("slidesparse: rank 1 was started otherwise than rank 0; got a difference in pattern; needed")
    assert list(tmp_path.glob("s*")) == []


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, source: Path) -> None:
    ended = prune(tmp_path, source, 2, MAGNITUDE, rank_processes.rank_1_sees_another_folder)
    assert all(map(has_failed, ended))
    (line,) = lines(ended)
    assert "rank 1 does not see what rank 0 writes in" in line
    assert "needed a folder that all machines share" in line


@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1"}]
)
def test_half_an_environment_is_refused(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["prune", str(source), str(tmp_path / "s"), *MAGNITUDE]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the processes of the run cannot meet" in line
    assert line.endswith("start them with torchrun, or unset WORLD_SIZE")


def test_one_process_alone_makes_no_group(tmp_path: Path, source: Path) -> None:
    code = (
        "import sys, slidesparse.cli\n"
        f"assert slidesparse.cli.main({['prune', str(source), str(tmp_path / 's'), '--quiet', *MAGNITUDE]}) == 0\n"
        "import torch.distributed as dist\n"
        "assert not dist.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
