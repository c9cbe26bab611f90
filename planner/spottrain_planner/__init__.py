"""What a job needs of its nodes: estimates of memory, the choice of a strategy, what would fit."""
