"""The HTTP API that agents call, and what it keeps for them: assignments and reports."""
