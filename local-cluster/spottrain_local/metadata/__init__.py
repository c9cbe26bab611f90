"""The clouds' metadata servers: one view for each node, which shows its interruption."""
