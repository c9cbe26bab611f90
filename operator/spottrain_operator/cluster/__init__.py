"""What the operator reads from Kubernetes and writes to it.

One side is JSON. The other side is values of the core.
"""
