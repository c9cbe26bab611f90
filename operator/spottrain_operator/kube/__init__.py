"""The operator's way to Kubernetes: requests, watches, caches and leader election.

It knows JSON, and not what the objects mean to a job.
"""
