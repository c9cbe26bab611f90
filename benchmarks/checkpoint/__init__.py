"""Parts of bench_checkpoint: ways to save, the ranks that run them, their store."""
