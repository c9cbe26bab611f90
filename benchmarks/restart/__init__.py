"""What one rank of bench_restart does."""
