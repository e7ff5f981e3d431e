"""Multiply by one 6:8 weight, without a model: python examples/linear.py [OUT] [IN] [TOKENS]."""

import sys

import torch

import slidesparse as ss

out_features, in_features, tokens = map(int, sys.argv[1:] or (1024, 4096, 64))
device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(out_features, in_features, device=device)
x = torch.randn(tokens, in_features, device=device)

# The two smallest of every eight go. Pruning a model does better: see prune.py.
weight = weight * ss.prune_mask(weight, "6:8")

# INT8, one scale a row; a weight in bfloat16 needs none.
scale = weight.abs().amax(1, keepdim=True) / 127
packed = ss.pack((weight / scale).round().to(torch.int8), "6:8", scale=scale)

# Activations are quantised a token at a time. On a GPU this runs on its Sparse Tensor Cores.
y = ss.matmul(x, packed)

dense = x @ weight.T
print(f"{tuple(y.shape)} on {device}, {(y - dense).norm() / dense.norm():.2%} off what the weight gives in float32")
print(f"2 of 8 weights are zero: {(packed.unpack() == 0).float().mean():.2%}")
