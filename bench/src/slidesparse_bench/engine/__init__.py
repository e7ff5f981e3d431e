"""The engines that are measured: their processes, and the checkpoints that they serve."""
