"""The objects of Kubernetes that the operator reads and writes.

One side is JSON. The other side is values of the core.
"""
