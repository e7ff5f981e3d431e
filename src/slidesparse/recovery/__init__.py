"""``slidesparse recover``: train a pruned model toward the dense one's predictions, with its zeros held."""
