"""The command line: argument parsing and printing, nothing else."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from slidesparse import __version__
from slidesparse.errors import InputError, SlideSparseError
from slidesparse.prune.base import METHODS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it worked, 1 with one line on standard error when it did not, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except SlideSparseError as error:
        print(f"slidesparse: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"slidesparse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slidesparse: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slidesparse", description="Sparse language models on 2:4 Sparse Tensor Cores."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print JSON instead of text")
        sub.set_defaults(command=command)
        return sub

    add("info", _info, "Show the GPU, the libraries, and which backends can run here.")

    demo = add("demo", _demo, "Prune a real trained model, prove exactness, and show what each pattern costs.")
    demo.add_argument(
        "--plot", type=Path, default=Path("slidesparse-demo.png"), help="where the plot goes (%(default)s)"
    )
    demo.add_argument("--device", default=None, help="cpu or cuda (default: cuda when there is one)")

    prune = add("prune", _prune, "Prune and quantise a local Hugging Face checkpoint.")
    prune.add_argument("source", type=Path, metavar="SRC", help="folder with config.json and safetensors")
    prune.add_argument("destination", type=Path, metavar="DST", help="folder to make")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--pattern", help="6:8, 4:6, 8:10, 2:4, ... or a share of one: 4:6@50%%")
    which.add_argument("--plan", type=Path, metavar="FILE", help="patterns that slidesparse plan chose")
    prune.add_argument(
        "--dtype", help="int8 or fp8; bf16, fp16 or fp32 to prune only (default: that of a quantised source)"
    )
    prune.add_argument(
        "--method", choices=sorted(METHODS), help="how weights are chosen (default: magnitude, or the plan's)"
    )
    _add_calibration(prune, "text for wanda and sparsegpt: UTF-8, .jsonl with text, or a data set on disk")
    prune.add_argument(
        "--device", help="where calibration runs the layers: cpu or cuda (default: cuda when there is one)"
    )
    prune.add_argument(
        "--recipe",
        default="absmax",
        choices=("absmax", "ternary"),
        help="how INT8 weights are rounded: one scale a channel, or BitNet b1.58's -1, 0, 1",
    )
    prune.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="leave a linear alone (name or re:...)"
    )
    prune.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="NAME=PATTERN",
        help="another pattern for a layer (name or re:...)",
    )
    prune.add_argument("--lm-head", action="store_true", help="treat the output embedding too")

    plan = add("plan", _plan, "Choose a pattern for every layer: the least damage at a speed, share of zeros or size.")
    plan.add_argument(
        "source", type=Path, metavar="SRC", help="folder with config.json and safetensors, in a float type"
    )
    plan.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="plan to make, for prune --plan")
    target = plan.add_mutually_exclusive_group(required=True)
    target.add_argument("--speedup", type=float, help="modelled, of all treated matrix products together: 1.2")
    target.add_argument("--sparsity", type=float, help="share of zeros: 0.25")
    target.add_argument("--memory", type=float, metavar="GB", help="treated weights in 8 bits, 2:4 form")
    plan.add_argument(
        "--mma-gain", default="2", help="2:4 over dense multiply: 2, or about 1.6 on Hopper (%(default)s)"
    )
    plan.add_argument("--method", default="sparsegpt", choices=sorted(METHODS), help="(default: %(default)s)")
    plan.add_argument("--patterns", nargs="+", metavar="PATTERN", help="what layers may get, beside staying dense")
    plan.add_argument("--backend", help="refuse patterns that it cannot run here in INT8")
    plan.add_argument("--ignore", action="append", default=[], metavar="NAME", help="leave a linear alone")
    plan.add_argument("--device", help="cpu or cuda; it holds the whole model (default: cuda when there is one)")
    _add_calibration(plan, "text to measure on: UTF-8, .jsonl with text, or a data set on disk", required=True)

    evaluate = add("eval", _eval, "Measure a checkpoint's perplexity on a text, or run tasks of lm-evaluation-harness.")
    evaluate.add_argument("path", type=Path, metavar="PATH", help="any local checkpoint, pruned or not")
    evaluate.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text, .jsonl with text, or a data set on disk"
    )
    evaluate.add_argument(
        "--window", type=int, help="tokens read at a time (default: 2048, or what the model can read)"
    )
    evaluate.add_argument("--stride", type=int, help="tokens between windows (default: half a window)")
    evaluate.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="needs the extra [eval]")
    evaluate.add_argument("--limit", type=int, help="examples of each task (default: all)")
    evaluate.add_argument("--batch", type=int, default=1, help="windows or examples at a time (%(default)s)")
    evaluate.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")

    pack = add("pack", _pack, "Write the packed form of a pruned checkpoint beside it, to load it faster.")
    pack.add_argument("path", type=Path, metavar="PATH")

    inspect = add("inspect", _inspect, "Show which patterns the linears of a checkpoint satisfy.")
    inspect.add_argument("path", type=Path, metavar="PATH")

    tune = add("tune", _tune, "Find the fastest algorithms and backends at a model's shapes, once for each GPU.")
    tune.add_argument("--models", nargs="+", metavar="MODEL", help="Qwen2.5-7B, ... (default: all known)")
    tune.add_argument("--pattern", action="append", metavar="PATTERN", help="(default: 2:4, 4:6, 6:8, 8:10)")
    tune.add_argument("--dtype", action="append", metavar="DTYPE", help="int8, fp8 or bf16 (default: int8 and fp8)")
    tune.add_argument(
        "--tokens", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 8192, 16384], help="(default: %(default)s)"
    )
    tune.add_argument("--backends", nargs="+", metavar="BACKEND", help="hopper, ... (default: all accelerated ones)")
    tune.add_argument("--algorithms-only", action="store_true", help="leave the choice of backends as it is")
    tune.add_argument(
        "--from",
        dest="records",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="measure nothing: take the layer times of files that bench wrote on this GPU",
    )

    bench = add("bench", _bench, "Measure this GPU: GEMMs, kernels, whole layers, packing.")
    bench.add_argument("benchmark", choices=("gemm", "kernels", "linear", "pack", "all", "vllm", "serve"))
    bench.add_argument("--profile", default="quick", choices=("quick", "full"), help="(default: %(default)s)")
    bench.add_argument(
        "--out", type=Path, required=True, metavar="FILE.jsonl", help="records file to make (.jsonl.gz to compress it)"
    )
    bench.add_argument("--dtype", action="append", metavar="DTYPE", help="int8, fp8, bf16 or fp16 (default: profile's)")
    bench.add_argument("--models", nargs="+", metavar="MODEL", help="Qwen2.5-7B, ... (default: the profile's)")
    bench.add_argument("--patterns", nargs="+", metavar="PATTERN", help="6:8, 4:6@50%%, ... (default: the profile's)")
    bench.add_argument(
        "--tokens", nargs="+", type=int, metavar="M", help="tokens at model shapes (default: the profile's)"
    )
    bench.add_argument(
        "--backends", nargs="+", metavar="BACKEND", help="dense, hopper, ... (default: all that can run; vllm: auto)"
    )
    bench.add_argument("--budget-s", type=float, metavar="S", help="seconds it may take (default: the profile's)")
    engine = bench.add_argument_group("vllm and serve only: whole models in vLLM, sparse against stock dense")
    engine.add_argument("--layers", type=int, metavar="N", help="decoder layers (default: all)")
    engine.add_argument("--graphs", type=int, metavar="M", help="CUDA graphs up to M tokens (default: vLLM's 512)")
    engine.add_argument("--scratch", type=Path, metavar="DIR", help="where checkpoints are written; serve reuses them")
    beside = bench.add_argument_group("vllm only: isolated requests and steps")
    beside.add_argument("--sequences", nargs="+", type=int, metavar="M", help="of a decoding step; --tokens of prefill")
    beside.add_argument("--rounds", type=int, metavar="N", help="of all engines (default: 9)")
    beside.add_argument("--alone", action="store_true", help="one engine after the other, as a server runs")
    served = bench.add_argument_group("serve only: engines under load, one at a time; a run goes on where --out ends")
    served.add_argument("--quick", action="store_true", help="bursts, the mixed load and one decode, alone")
    served.add_argument("--engines", nargs="+", metavar="ENGINE", help="of: stock, control, 6:8, ..., 'stock again'")
    served.add_argument("--gpus", type=int, metavar="N", help="tensor parallelism (default: 1)")
    served.add_argument("--timeline", type=int, metavar="N", help="profile N steps of the mixed load instead")

    report = add("report", _report, "Draw tables and plots from benchmark records.")
    report.add_argument("records", type=Path, nargs="+", metavar="RECORDS", help="files that bench wrote")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to draw into")
    return parser


def _add_calibration(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    parser.add_argument("--calibration", metavar="FILE", required=required, help=text)
    parser.add_argument("--samples", type=int, default=128, help="calibration windows (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of a window (default: 2048, or what the model can read)")
    parser.add_argument("--seed", type=int, default=0, help="which windows of the text are taken (%(default)s)")


def _info(options: argparse.Namespace) -> int:
    from slidesparse.commands import info

    found = info.collect()
    print(json.dumps(found, indent=2) if options.json else info.describe(found))
    return 0


def _device(options: argparse.Namespace) -> str:
    import torch

    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _demo(options: argparse.Namespace) -> int:
    from slidesparse.demo.run import run_demo

    report = run_demo(options.plot, device=_device(options))
    print(json.dumps(report.to_json(), indent=2) if options.json else f"{report.table()}\nplot: {options.plot}")
    return 0 if report.exact else 1


def _prune(options: argparse.Namespace) -> int:
    from slidesparse.commands.plan import as_options, read_plan
    from slidesparse.commands.prune import PruneOptions, prune_checkpoint
    from slidesparse.files.calibration import Calibration

    pairs = [entry.rpartition("=") for entry in options.layer]
    layers = {name: pattern for name, _, pattern in pairs}
    if "" in layers or len(layers) < len(pairs):
        raise InputError("--layer", got=", ".join(options.layer), needed="NAME=PATTERN, each name once")
    pattern, method = options.pattern, options.method or "magnitude"
    if options.plan is not None:
        if layers:
            raise InputError("--layer beside --plan", needed="one of them")
        plan = read_plan(options.plan)
        pattern, layers = as_options(plan.layers)
        method = options.method or plan.method
    calibration = None
    if options.calibration is not None:
        calibration = Calibration(options.calibration, options.samples, options.length, options.seed)
    summary = prune_checkpoint(
        options.source,
        options.destination,
        PruneOptions(
            pattern=pattern,
            dtype=options.dtype,
            method=method,
            calibration=calibration,
            recipe=options.recipe,
            ignore=tuple(options.ignore),
            layers=layers,
            lm_head=options.lm_head,
        ),
        device=_device(options),
    )
    print(json.dumps(summary.to_json(), indent=2) if options.json else summary.describe())
    return 0


@contextmanager
def _standard_output_kept_clean() -> Iterator[None]:
    """Send to standard error what libraries print: the solver's C code prints lines of its own, whatever it is told."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C code printed may still wait for its turn
        os.dup2(kept, 1)
        os.close(kept)


def _plan(options: argparse.Namespace) -> int:
    from slidesparse.commands import plan as planning
    from slidesparse.files.calibration import Calibration
    from slidesparse.models.plan import Target

    wanted = planning.PlanOptions(
        target=Target(options.speedup, options.sparsity, options.memory),
        calibration=Calibration(options.calibration, options.samples, options.length, options.seed),
        method=options.method,
        patterns=tuple(options.patterns or planning.CANDIDATES),
        mma_gain=planning.parse_gain(options.mma_gain),
        ignore=tuple(options.ignore),
        backend=options.backend,
    )
    with _standard_output_kept_clean():
        plan = planning.plan_checkpoint(options.source, options.out, wanted, device=_device(options))
    print(options.out.read_text().rstrip() if options.json else planning.describe(plan, wanted, options.out))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from slidesparse.commands.evaluate import evaluate

    evaluation = evaluate(
        options.path,
        text=options.text,
        window=options.window,
        stride=options.stride,
        batch=options.batch,
        tasks=options.tasks,
        limit=options.limit,
        device=_device(options),
    )
    print(json.dumps(evaluation.to_json(), indent=2) if options.json else evaluation.describe())
    return 0


def _pack(options: argparse.Namespace) -> int:
    from slidesparse.files.packed_file import write_packed

    file = write_packed(options.path)
    size = file.stat().st_size
    print(json.dumps({"file": str(file), "bytes": size}) if options.json else f"{file}: {size / 1e6:.1f} MB")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from slidesparse.commands.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(options.path)
    print(json.dumps(inspection.to_json(), indent=2) if options.json else inspection.table())
    return 0 if inspection.ok else 1


def _tune(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from slidesparse.bench import runner, tune
    from slidesparse.bench.problems import PROFILES

    plan = tune.plan(options.models, options.pattern, options.dtype, options.tokens, options.backends)
    algorithms = [] if options.records else tune.search_algorithms(plan)
    path, layers = None, []
    if options.records:
        layers = tune.recorded_layers(options.records)
        path = tune.store_layers(layers)
    elif not options.algorithms_only:
        profile = replace(PROFILES["quick"], model_patterns=plan.patterns)
        for found in tune.measure_layers(plan, runner.cuda_session(profile)):
            path = tune.store_layers(found)  # whatever becomes of the rest
            layers += found
    print(json.dumps(tune.to_json(algorithms, layers)) if options.json else tune.describe(algorithms, layers, path))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from slidesparse.bench import problems, runner

    _require_own_options(options)
    if options.benchmark == "vllm":
        return _bench_vllm(options)
    if options.benchmark == "serve":
        return _bench_serve(options)
    profile = runner.adapt(
        problems.PROFILES[options.profile],
        options.dtype,
        options.models,
        options.budget_s,
        patterns=options.patterns,
        tokens=options.tokens,
        backends=options.backends,
    )
    names = problems.BENCHMARKS if options.benchmark == "all" else (options.benchmark,)
    summary = runner.run(names, profile, runner.cuda_session(profile), options.out)
    print(json.dumps(asdict(summary), indent=2) if options.json else summary.describe())
    return 1 if summary.wrong else 0


def _require_own_options(options: argparse.Namespace) -> None:
    """Refuse options of bench that mean nothing to the benchmark asked for."""
    owners = {
        ("vllm", "serve"): ("layers", "graphs", "scratch"),
        ("vllm",): ("sequences", "rounds", "alone"),
        ("serve",): ("quick", "engines", "gpus", "timeline"),
    }
    for benchmarks, names in owners.items():
        given = [name for name in names if getattr(options, name) not in (None, False)]
        if given and options.benchmark not in benchmarks:
            told = ", ".join(f"--{name}" for name in given)
            raise InputError(told, got=f"bench {options.benchmark}", needed=f"bench {' or '.join(benchmarks)}")


def _bench_vllm(options: argparse.Namespace) -> int:
    from slidesparse.bench import vllm

    if options.budget_s is not None:
        raise InputError("--budget-s", needed="another benchmark: engines take the minutes that they take to start")
    profile = vllm.adapt(
        vllm.PROFILES[options.profile],
        options.dtype,
        options.models,
        patterns=options.patterns,
        tokens=options.tokens,
        sequences=options.sequences,
        rounds=options.rounds,
        layers=options.layers,
        graphs=options.graphs,
        alone=options.alone,
        backends=options.backends,
    )
    records = vllm.run(profile, options.out, options.scratch)
    told = {"path": str(options.out), "records": len(records)}
    print(json.dumps(told) if options.json else f"{len(records)} records: {options.out}")
    return 0


def _bench_serve(options: argparse.Namespace) -> int:
    from slidesparse.bench import serve, serve_plan

    if options.tokens is not None:
        raise InputError("--tokens", needed="another benchmark: the workloads of bench serve are fixed")
    profile = serve_plan.adapt(
        quick=options.quick,
        dtypes=options.dtype,
        models=options.models,
        patterns=options.patterns,
        backends=options.backends,
        engines=options.engines,
        graphs=options.graphs,
        layers=options.layers,
        gpus=options.gpus,
        timeline=options.timeline,
        budget_s=options.budget_s,
    )
    summary = serve.run(profile, options.out, options.scratch)
    print(json.dumps(asdict(summary), indent=2) if options.json else summary.describe())
    return 1 if summary.failed else 0


def _report(options: argparse.Namespace) -> int:
    from slidesparse import served_records
    from slidesparse.records import read_records
    from slidesparse.report import write_report
    from slidesparse.report.serve import write_serve_report

    served, profiled = (
        [path for path in options.records if served_records.is_of(kind, path)]
        for kind in (served_records.SERVE, served_records.TIMELINE)
    )
    others = [path for path in options.records if path not in (*served, *profiled)]
    written = write_report(read_records(others), options.out) if others else []
    if served or profiled:
        loads = served_records.read(served_records.ServeRecord, served)
        steps = served_records.read(served_records.TimelineRecord, profiled)
        written += write_serve_report(loads, steps, options.out)
    print(json.dumps([str(path) for path in written], indent=2) if options.json else "\n".join(map(str, written)))
    return 0
