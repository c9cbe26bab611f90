"""The `spottrain` command: show jobs, write reports, and run a local cluster.

kubectl shows the same objects.
"""
