"""Peak memory of a training step, measured and estimated."""
