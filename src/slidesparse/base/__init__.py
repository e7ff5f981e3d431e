"""What everything else may use and what knows nothing of sparsity: files of JSON, caches, progress, devices."""
