"""What binds a rank to its node and to the other ranks: launch, drains, progress, outcome."""
