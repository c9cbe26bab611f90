"""The clouds' metadata servers, one view per node, on which an interruption can be scheduled."""
