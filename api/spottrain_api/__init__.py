"""The TrainingJob API and the messages between spottrain's parts.

Imported by the operator, the agent, the watcher, the trainer library and the CLI. It needs pydantic
alone: no kopf, no torch, no Kubernetes client.
"""
