"""Parts of bench_throughput: the model and its arithmetic, and the rank that trains it."""
