"""The clouds' metadata servers: each node has a view with its interruption."""
