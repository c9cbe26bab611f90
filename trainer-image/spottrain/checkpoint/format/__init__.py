"""What a store holds: HEAD, manifests, receipts and data files.

The modules turn a state into these.
"""
