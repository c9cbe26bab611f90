"""Runs on each spot node: turns a cloud's preemption signals into notices for the agents and the operator."""
