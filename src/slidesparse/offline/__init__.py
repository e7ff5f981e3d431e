"""All that makes or judges a checkpoint: prune, plan, inspect, eval."""
