"""Parts of bench_throughput: the model, its arithmetic and the rank that trains."""
