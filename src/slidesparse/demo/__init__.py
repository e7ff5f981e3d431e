"""``slidesparse demo``: a real encoder, pruned, proved exact and shown."""
