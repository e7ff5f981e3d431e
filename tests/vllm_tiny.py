"""A process that serves tiny models in vLLM, one engine after the other, sparse and stock, and says what they answered.

vLLM takes half a minute to be imported and a tiny model seconds to be served, so a process serves many.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from vllm_answers import Answers
from vllm_families import SMALL, VISION_MODEL, write_pruned

from slidesparse.errors import SlideSparseError
from slidesparse.offline.prune_options import PruneRounding
from slidesparse_bench.engine.eagle_head import write_eagle_head
from slidesparse_bench.engine.engine_process import ENVIRONMENT, EngineOptions, answer_calls

PROMPTS, TOKENS, LIKELIEST = 4, 32, 20
RANK = 8
NUDGE = 2.0**-7
"""How much the scale of each output channel of a nudged checkpoint differs, relative."""

SPARSE = {"slidesparse": {"backend": "hopper", "experts": "sparse"}}
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 200_000_000,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "enforce_eager": True,
}


class Case(NamedTuple):
    """One engine, and what is done with it.

    Attributes:
        sparse: Serve with the plugin, every layer sparse; otherwise stock vLLM serves the same checkpoint dense.
        arguments: More arguments of ``vllm.LLM``; a ``Path`` in them is made, as :meth:`Server.path` says.
        steps: What is done, in order; each step gives answers. See :data:`STEPS`.
        family: Of :data:`vllm_families.FAMILIES`, ``MIXTURES`` or ``DEEP``.
        dtype: ``int8`` or ``fp8``.
        model: Which checkpoint, as :meth:`Server.path` says.
    """

    sparse: bool
    arguments: dict[str, Any] = {}  # noqa: RUF012
    steps: tuple[str, ...] = ("ask",)
    family: str = "llama3"
    dtype: str = "int8"
    model: str = "first"


class Served(NamedTuple):
    """What became of a case.

    Attributes:
        answers: Of each step.
        facts: What shows that the engine did what it was asked to do.
        error: The first line of an error, which ended the case.
    """

    answers: list[Answers]
    facts: dict[str, Any]
    error: str | None = None


def serve(connection: Connection, options: EngineOptions) -> None:
    """Run cases in this process, until the other end has no more."""
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    answer_calls(connection, lambda: Server(options.folder))


def serve_apart(connection: Connection, options: EngineOptions) -> None:
    """Run cases whose engines have processes of their own, as those of several GPUs need."""
    # What counts layers is sent to them.
    os.environ.update(ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    answer_calls(connection, lambda: Server(options.folder))


def prompts() -> list[list[int]]:
    """Prompts of 60 to 300 tokens, whose second half begins as the first."""
    draw = random.Random(0)
    halves = [[draw.randrange(20, SMALL["vocab_size"]) for _ in range(30 + 40 * i)] for i in range(PROMPTS)]
    return [half + half[: 2 * len(half) // 3] for half in halves]


class Server:
    """Checkpoints in a folder, and the engines that serve them one after the other."""

    def __init__(self, folder: Path) -> None:
        from vllm.model_executor.models import registry

        if hasattr(registry, "_run_in_subprocess"):  # another process would import vLLM again, for each family
            registry._run_in_subprocess = lambda look: look()
        self.folder = folder

    def run(self, cases: Sequence[Case]) -> list[Served]:
        """Serve cases one after the other; one that fails does not end the others."""
        return [self._served(case) for case in cases]

    def path(self, family: str, dtype: str, what: str) -> Path:
        """Return a checkpoint, made on the first call."""
        return checkpoint(self.folder, family, dtype, what)

    def _served(self, case: Case) -> Served:
        answers: list[Answers] = []
        facts: dict[str, Any] = {}
        llm: Any = None
        try:
            from vllm import LLM

            arguments = ARGUMENTS | {"model": str(self.path(case.family, case.dtype, case.model))}
            if case.family == VISION_MODEL:
                arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}
            ours = {"additional_config": SPARSE} if case.sparse else {"quantization": "compressed-tensors"}
            llm = LLM(**arguments | ours | self._with_paths(case))
            for step in case.steps:
                answers.append(STEPS[step](self, llm, facts))
            facts |= gather_facts(llm)
            return Served(answers, facts)
        except Exception as error:  # of vLLM or ours; the test that asked for this case shows it
            return Served(answers, facts, f"{type(error).__name__}: {error}".replace("\n", " ")[:600])
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            torch.cuda.empty_cache()

    def _with_paths(self, case: Case) -> dict[str, Any]:
        arguments = dict(case.arguments)
        speculative = arguments.get("speculative_config")
        if speculative is not None and speculative["method"] in ("draft_model", "eagle3"):
            arguments["speculative_config"] = speculative | {
                "model": str(self.path(case.family, case.dtype, speculative["model"]))
            }
        return arguments


# -- what is done with an engine -----------------------------------------------------------------------------------


def ask(server: Server, llm: Any, facts: dict[str, Any], adapter: Any = None) -> Answers:
    """Each prompt alone: then nothing depends on how requests happen to share a batch."""
    from vllm import SamplingParams

    tokens, likeliest, cached = [], [], 0
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0, detokenize=False)
    first = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, logprobs=LIKELIEST)
    for prompt in prompts():
        given = [{"prompt_token_ids": prompt}]
        (output,) = llm.generate(given, greedy, use_tqdm=False, lora_request=adapter)
        tokens.append(list(output.outputs[0].token_ids))
        (output,) = llm.generate(given, first, use_tqdm=False, lora_request=adapter)
        likeliest.append({token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()})
        cached += output.num_cached_tokens or 0
    facts["cached"] = cached
    return Answers(tokens, likeliest)


def ask_with_adapter(server: Server, llm: Any, facts: dict[str, Any]) -> Answers:
    from vllm.lora.request import LoRARequest

    return ask(server, llm, facts, LoRARequest("adapter", 1, str(server.path("llama3", "int8", "adapter"))))


def sleep_and_ask(server: Server, llm: Any, facts: dict[str, Any]) -> Answers:
    """Weights go to host memory and come back."""
    llm.sleep(level=1)
    llm.wake_up()
    return ask(server, llm, facts)


def sleep_deeply_and_ask(server: Server, llm: Any, facts: dict[str, Any]) -> Answers:
    """Weights are forgotten, and loaded again."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    return ask(server, llm, facts)


def reload_and_ask(server: Server, llm: Any, facts: dict[str, Any]) -> Answers:
    """Other weights of the same pattern are loaded into the running engine."""
    path = server.path("llama3", "int8", "second")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    return ask(server, llm, facts)


def reload_what_does_not_fit(server: Server, llm: Any, facts: dict[str, Any]) -> Answers:
    """Weights without the pattern; the engine cannot be used afterwards."""
    path = server.path("llama3", "int8", "unpruned")
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    except SlideSparseError as error:
        facts["refused"] = str(error)
    return Answers([], [])


STEPS: dict[str, Callable[[Server, Any, dict[str, Any]], Answers]] = {
    "ask": ask,
    "ask with adapter": ask_with_adapter,
    "sleep": sleep_and_ask,
    "sleep deeply": sleep_deeply_and_ask,
    "reload": reload_and_ask,
    "reload what does not fit": reload_what_does_not_fit,
}


def gather_facts(llm: Any) -> dict[str, Any]:
    """Return what an engine was configured to do, and how many layers of the model run sparse."""
    config = llm.llm_engine.vllm_config
    facts = {
        "sparse": llm.apply_model(count_sparse)[0],
        "experts": llm.apply_model(count_experts)[0],
        "async": config.scheduler_config.async_scheduling,
        "batched": config.scheduler_config.max_num_batched_tokens,
        "cache": config.cache_config.cache_dtype,
        "graphs": str(config.compilation_config.cudagraph_mode),
    }
    if config.speculative_config is not None:
        counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        facts |= {name: counters[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}
    return facts


def count_sparse(model: torch.nn.Module) -> int:
    slides = [vars(module)["slide"] for module in model.modules() if "slide" in vars(module)]
    return sum(slide.choice.backends in (("hopper",), ("hopper-6bit",)) for slide in slides)


def count_experts(model: torch.nn.Module) -> int:
    """Return how many layers have packed experts."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return sum(getattr(method, "slide", None) is not None for method in dict.fromkeys(methods))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, family: str, dtype: str, what: str, **shapes: int) -> Path:
    """Return a checkpoint, made on the first call.

    ``first`` and ``second`` have other weights; ``six bits`` are the first ones rounded so; ``unmarked`` are the first
    ones, which stock servers and the plugin serve dense; ``nudged`` have slightly other scales; ``unpruned`` breaks the
    pattern; ``adapter`` is one, and ``eagle`` a draft of EAGLE-3.
    """
    path = folder / f"{family}-{dtype}-{what}"
    if path.exists():
        return path
    if what in ("first", "second", "six bits"):
        rounding: PruneRounding = "6bit" if what == "six bits" else "absmax"
        made = write_pruned(
            folder / f"{path.name}-made", family, "6:8", dtype, int(what == "second"), rounding, **shapes
        )
        made.rename(path)
    elif what == "adapter":
        write_adapter(path)
    elif what == "eagle":
        config = json.loads((checkpoint(folder, family, dtype, "first", **shapes) / "config.json").read_text())
        write_eagle_head(path, config, torch.device("cpu"), 512)
    else:
        path.mkdir()
        changed(checkpoint(folder, family, dtype, "first", **shapes), path, what)
    return path


def changed(source: Path, destination: Path, how: str) -> None:
    """Write a changed copy of a pruned checkpoint."""
    config = json.loads((source / "config.json").read_text())
    if how == "unmarked":
        del config["slidesparse_config"]
    (destination / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(str(source / "model.safetensors"))
    for name, tensor in tensors.items():
        if how == "nudged" and name.endswith("weight_scale"):
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            tensors[name] = tensor * (1 + NUDGE * signs)
        if how == "unpruned" and tensor.dtype == torch.int8:
            tensors[name] = tensor + (tensor == 0).to(torch.int8)
    save_file(tensors, str(destination / "model.safetensors"), {"format": "pt"})


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of all linears of the tiny Llama, in PEFT's format."""
    hidden, inner = SMALL["hidden_size"], SMALL["intermediate_size"]
    q, kv = (SMALL["head_dim"] * SMALL[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for part, linears in (("self_attn", attention), ("mlp", mlp)):
            for name, (out, columns) in linears.items():
                prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
                for which, rows, width in (("A", RANK, columns), ("B", out, RANK)):
                    factor = torch.randn(rows, width, generator=generator) * width**-0.5
                    tensors[f"{prefix}.lora_{which}.weight"] = factor.bfloat16()
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0} | {
        "bias": "none",
        "target_modules": [*attention, *mlp],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
