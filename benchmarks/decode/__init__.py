"""Experiments on decoding: changed copies of the Hopper kernel, checked and timed beside the product's own."""
