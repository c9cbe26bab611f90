"""Data sets in shards: objects of a bucket with an index, read in one global order through a bounded cache."""
