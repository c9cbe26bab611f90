"""The TrainingJob API and the messages between spottrain's parts.

The operator, the agent, the watcher, the trainer library and the CLI import it. It needs only pydantic.
"""
