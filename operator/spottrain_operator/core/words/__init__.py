"""Sentences for people, about one pod or a few."""
