"""From tensors in memory to a commit: staging, upload, receipts, retention."""
