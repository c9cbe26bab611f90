"""Messages and names that operator, watcher, agents and ranks share.

This package holds every label, environment name, file name and message, so that two parts can't disagree. Messages
travel as JSON with camelCase keys, over HTTP (agent and operator, agent and watcher) and as small files in a
generation's *run directory* (agent and ranks). Each message carries the whole current state, so a lost, repeated or
late message does no harm.

Times are timezone-aware UTC; durations are seconds.
"""
