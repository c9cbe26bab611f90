"""The HTTP API that agents call, with their assignments and reports."""
