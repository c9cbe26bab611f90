"""The session and the step loop."""
