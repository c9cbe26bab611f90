"""The last module that ranks import before they fork.

It excludes earlier objects from garbage collection.

The agent's zygote does the same. DeepSpeed collects garbage when it prepares a model, which would take half a second
with all these objects.
"""

import gc

gc.freeze()
