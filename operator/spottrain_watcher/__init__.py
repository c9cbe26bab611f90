"""The watcher on each spot node.

It turns a cloud's preemption signals into notices for agents and the operator.
"""
