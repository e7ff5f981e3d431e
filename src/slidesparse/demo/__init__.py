"""``slidesparse demo``: a real encoder, pruned and proved exact."""
