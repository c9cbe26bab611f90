"""A rank's links to its node and other ranks: launch, drains, progress, outcome."""
