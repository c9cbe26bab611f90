"""Parts of bench_control_api."""
