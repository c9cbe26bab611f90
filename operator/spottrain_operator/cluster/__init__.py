"""What the operator reads from Kubernetes and writes to it: JSON on one side, values of the core on the other."""
