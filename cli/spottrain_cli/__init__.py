"""The `spottrain` command: look at jobs, make reports, and run a local cluster. It hides nothing of kubectl."""
