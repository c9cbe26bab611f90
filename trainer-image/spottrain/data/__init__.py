"""Which samples a rank reads, in which order, with which random numbers."""
