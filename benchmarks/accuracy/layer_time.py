"""How long calibrated pruning of one 7B-shaped layer takes: random weights, random inputs, a whole decoder layer.

python benchmarks/accuracy/layer_time.py --out results/accuracy/layer-time.jsonl
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from run import Log, commit, machine

from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern

SHAPES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 2, "num_key_value_heads": 2}
LAYERS_OF_7B = 32
SAMPLES, LENGTH, PER_BATCH = 128, 2048, 4


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pattern", nargs="+", default=["6:8", "4:6"])
    parser.add_argument("--tiny", action="store_true", help="to try the script on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, samples = (torch.float32, 4) if options.tiny else (torch.bfloat16, SAMPLES)
    shapes = TINY if options.tiny else SHAPES
    log = Log(options.out, commit=commit(), machine=machine(device))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shapes, num_hidden_layers=2, vocab_size=512, max_position_embeddings=LENGTH, tie_word_embeddings=True
    )
    model: Any = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    linears = find_targets(model).linears
    originals = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    layer_list = find_layer_list(model, linears)
    ids = torch.randint(0, 512, (samples, LENGTH), device=device)
    batches = [{"input_ids": chunk, "use_cache": False} for chunk in ids.split(PER_BATCH)]
    for method in ("wanda", "sparsegpt"):
        for text in options.pattern:
            pruner, patterns = get_pruner(method), dict.fromkeys(linears, Pattern.parse(text))
            sets = sets_to_prune(model, linears, patterns, pruner, run_once(model))
            for name, weight in originals.items():
                linears[name].weight.data.copy_(weight)
            seconds = []
            started = time.perf_counter()
            # Layer 0 pays for what is done once (libraries, memory); layer 1 is like those that follow.
            for losses in prune_layers(
                model, layer_list, sets, patterns, pruner, record_inputs(model, layer_list, batches)
            ):
                float(losses[-1].loss)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
                started = time.perf_counter()
            log.write(
                f"layer {method} {text}",
                method=method,
                pattern=text,
                shapes=shapes,
                windows=samples,
                length=LENGTH,
                first_layer_s=seconds[0],
                layer_s=seconds[1],
                model_of_32_layers_s=seconds[0] + (LAYERS_OF_7B - 1) * seconds[1],
            )


if __name__ == "__main__":
    main()
