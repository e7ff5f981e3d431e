"""The commands ``bench`` and ``report``: their arguments, and what they print."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from slidesparse.cli.arguments import Commands, add_command, named_path
from slidesparse.errors import InputError

USUAL = "quick"
"""The profile of a benchmark, unless the user names another."""


def add_bench(commands: Commands, text: str) -> None:
    """Add ``slidesparse bench``, with its help."""
    bench = add_command(commands, "bench", _bench, text)
    bench.add_argument("benchmark", choices=("gemm", "kernels", "linear", "pack", "all", "serve"))
    bench.add_argument("--profile", choices=(USUAL, "full"), help=f"(default: {USUAL})")
    bench.add_argument(
        "--out",
        type=named_path,
        required=True,
        metavar="FILE.jsonl",
        help="records file to make (.jsonl.gz to compress it)",
    )
    bench.add_argument("--dtype", action="append", metavar="DTYPE", help="int8, fp8, bf16 or fp16 (default: profile's)")
    bench.add_argument("--models", nargs="+", metavar="MODEL", help="Qwen2.5-7B, ... (default: the profile's)")
    bench.add_argument("--patterns", nargs="+", metavar="PATTERN", help="6:8, 4:6, ... (default: the profile's)")
    bench.add_argument(
        "--tokens", nargs="+", type=int, metavar="M", help="tokens at model shapes (default: the profile's)"
    )
    bench.add_argument(
        "--backends", nargs="+", metavar="BACKEND", help="dense, hopper, ... (default: all that can run; serve: auto)"
    )
    bench.add_argument("--budget-s", type=float, metavar="S", help="seconds it may take (default: the profile's)")
    bench.add_argument("--grouped", action="store_true", help="gemm only: the experts of mixtures, and whole layers")
    served = bench.add_argument_group("serve only: engines under load, one at a time; a run goes on where --out ends")
    served.add_argument("--layers", type=int, metavar="N", help="decoder layers (default: all)")
    served.add_argument("--graphs", type=int, metavar="M", help="CUDA graphs up to M tokens (default: the plugin's)")
    served.add_argument("--scratch", type=named_path, metavar="DIR", help="where checkpoints are written and kept")
    served.add_argument("--quick", action="store_true", help="bursts, the mixed load and one decode, alone")
    served.add_argument("--engines", nargs="+", metavar="ENGINE", help="of: stock, control, 6:8, ..., 'stock again'")
    served.add_argument("--gpus", type=int, metavar="N", help="tensor parallelism (default: 1)")
    served.add_argument(
        "--workloads", nargs="+", metavar="LOAD", help="of: burst, mixed, 'arrivals at 80%%', long, ..."
    )
    served.add_argument("--soak", type=float, metavar="S", help="then requests at random for S seconds, and a verdict")
    served.add_argument("--server", choices=("vllm", "sglang"), help="whose engines (default: vllm)")
    served.add_argument("--rivals", nargs="+", metavar="TYPE", help="also stock in fp8, w4a8, w4a16")
    served.add_argument("--eagle", type=float, metavar="N", help="EAGLE-3's drafts, forced to give N tokens a step")


def _bench(options: argparse.Namespace) -> int:
    from slidesparse_bench import problems, runner

    _require_own_options(options)
    if options.benchmark == "serve":
        return _bench_serve(options)
    if options.grouped:
        return _bench_grouped(options)
    profile = runner.adapt(
        problems.PROFILES[options.profile or USUAL],
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


def _bench_grouped(options: argparse.Namespace) -> int:
    from slidesparse.weights.quant import QUANT_NAMES
    from slidesparse_bench import problems, runner
    from slidesparse_bench.expert_sizes import MIXTURES
    from slidesparse_bench.kernels import mixtures
    from slidesparse_bench.records import GROUPED, read_records
    from slidesparse_bench.report.experts import expert_tables
    from slidesparse_bench.report.numbers import comparisons

    if options.backends is not None:
        raise InputError("--backends", got="--grouped", needed="none: one backend multiplies by experts")
    profile = runner.adapt(
        mixtures.profile_of(problems.PROFILES[options.profile or USUAL]),
        options.dtype,
        options.models,
        options.budget_s,
        patterns=options.patterns,
        tokens=options.tokens,
        known_models=MIXTURES,
        known_dtypes=QUANT_NAMES,
    )
    summary = runner.run((GROUPED,), profile, runner.cuda_session(profile), options.out)
    if options.json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        tables = expert_tables(comparisons(read_records([options.out])))
        print(summary.describe(), *(f"{table.title}\n\n{table.text()}" for table in tables), sep="\n\n")
    return 1 if summary.wrong else 0


def _require_own_options(options: argparse.Namespace) -> None:
    """Refuse options of bench that mean nothing to the benchmark asked for."""
    owners = {
        ("gemm", "kernels", "linear", "pack", "all"): ("profile",),
        ("gemm", "linear", "pack", "all", "serve"): ("models",),
        ("gemm", "kernels", "linear", "all"): ("tokens",),
        ("gemm",): ("grouped",),
        ("serve",): (
            *("layers", "graphs", "scratch", "quick", "engines", "gpus", "workloads", "soak"),
            *("server", "rivals", "eagle"),
        ),
    }
    for benchmarks, names in owners.items():
        given = [name for name in names if getattr(options, name) not in (None, False)]
        if given and options.benchmark not in benchmarks:
            named = ", ".join(f"--{name}" for name in given)
            raise InputError(named, got=f"bench {options.benchmark}", needed=f"bench {' or '.join(benchmarks)}")


def _bench_serve(options: argparse.Namespace) -> int:
    from slidesparse_bench.serve import serve, serve_profile

    profile = serve_profile.adapt(
        quick=options.quick,
        dtypes=options.dtype,
        models=options.models,
        patterns=options.patterns,
        backends=options.backends,
        engines=options.engines,
        graphs=options.graphs,
        layers=options.layers,
        gpus=options.gpus,
        workloads=options.workloads,
        soak_s=options.soak,
        server=options.server or "vllm",
        rivals=options.rivals,
        eagle=options.eagle,
        budget_s=options.budget_s,
    )
    summary = serve.run(profile, options.out, options.scratch)
    print(json.dumps(asdict(summary), indent=2) if options.json else summary.describe())
    return 1 if summary.failed else 0


def add_report(commands: Commands, text: str) -> None:
    """Add ``slidesparse report``, with its help."""
    report = add_command(commands, "report", _report, text)
    report.add_argument("records", type=named_path, nargs="+", metavar="RECORDS", help="files that bench wrote")
    report.add_argument("--out", type=named_path, required=True, metavar="DIR", help="folder to draw into")


def _report(options: argparse.Namespace) -> int:
    from slidesparse_bench import served_records
    from slidesparse_bench.records import read_records
    from slidesparse_bench.report import write_report
    from slidesparse_bench.report.serve import write_serve_report

    served = [path for path in options.records if served_records.benchmark_of(path) == served_records.SERVE]
    others = [path for path in options.records if path not in served]
    records, loads = read_records(others), served_records.read(served)
    written = write_report(records, options.out) if others else []
    written += write_serve_report(loads, options.out) if served else []
    print(json.dumps([str(path) for path in written], indent=2) if options.json else "\n".join(map(str, written)))
    return 0
