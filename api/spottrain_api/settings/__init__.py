"""Settings of the ranks, each defined once.

The spec of a TrainingJob and the messages for ranks are made of these models. In a spec, unknown fields are refused.
In a message, they are ignored.
"""
