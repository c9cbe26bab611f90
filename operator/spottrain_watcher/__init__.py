"""The watcher on each spot node: turns a cloud's preemption signals into notices for agents and the operator."""
