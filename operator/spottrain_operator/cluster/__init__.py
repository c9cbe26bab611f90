"""What the operator reads from Kubernetes and writes to it: objects as JSON outside, values of the core inside."""
