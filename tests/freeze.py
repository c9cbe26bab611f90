"""The last module that forks of ranks share: what was imported before it is garbage collection's business no more.

As in the agent's zygote. DeepSpeed collects garbage when it prepares a model: half a second with all of that.
"""

import gc

gc.freeze()
