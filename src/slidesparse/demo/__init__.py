"""``slidesparse demo``: a real encoder, pruned, proved exact and plotted."""
