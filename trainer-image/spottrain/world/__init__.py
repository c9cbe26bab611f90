"""A rank's links to its node and to the other ranks: launch, drains, progress, outcome."""
