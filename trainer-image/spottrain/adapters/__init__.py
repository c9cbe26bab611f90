"""Notices, commits and resumes for loops of other frameworks.

`spottrain.adapters.transformers` is for Hugging Face's Trainer, `.lightning` for Lightning and `.accelerate` for
Accelerate. Each imports its framework; the extra `adapters` installs them.
"""
