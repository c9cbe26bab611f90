"""Parts of bench_checkpoint: the ways to save, the ranks that run them, and the store that they write to."""
