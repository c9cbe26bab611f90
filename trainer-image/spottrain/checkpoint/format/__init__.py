"""What a store holds: HEAD, manifests, receipts and data files, and how a state becomes these."""
