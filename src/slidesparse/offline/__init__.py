"""All that makes or judges a checkpoint: prune, inspect, eval."""
