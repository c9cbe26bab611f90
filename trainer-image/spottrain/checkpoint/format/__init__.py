"""What a store holds: HEAD, manifests, receipts and data files, and how state becomes them."""
