"""Data without an index: streams of items that are read from their beginning."""
