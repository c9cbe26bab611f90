"""TrainingJob, spottrain.dev/v1alpha1.

The spec is what the user asks for, and the status what the operator reports.

These models are the single source of the CRD: `python -m spottrain_api.crd` generates crds/ from them, with their
descriptions, defaults, bounds and CEL rules. Keys are camelCase in YAML.
"""
