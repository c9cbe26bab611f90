"""Replicas of shards in the memory of peers."""
