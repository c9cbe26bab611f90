"""Mixtures of data sets by weight."""
