"""The notice path, the commits and the resume for loops of other frameworks.

`spottrain.adapters.transformers` is for Hugging Face's Trainer, `.lightning` for Lightning and `.accelerate` for
Accelerate. Each imports its framework, which `pip install spottrain[adapters]` brings.
"""
