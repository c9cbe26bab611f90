"""What the process that ranks and agents are forked from does before the first fork.

It imports what ranks import, and does once what each of them would do again at its start. It starts no thread and no
collective: a fork would not survive them.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any, cast

from spottrain_agent.zygote import PRELOADED_MODULES, REQUIRED_MODULES, preload

# A search for garbage among the imports takes long, and finds next to nothing.
gc.disable()
# PEFT imports bitsandbytes if it is installed, which loads torch's compiler: a rank must not do that by itself. An
# import that is None counts as not installed.
cast(dict[str, Any], sys.modules)["bitsandbytes"] = None

preload(
    (
        *REQUIRED_MODULES,
        *PRELOADED_MODULES,
        "kill_point",
        "multiprocessing.popen_fork",
        "google.cloud.storage",
        "spottrain.adapters.transformers",
        "spottrain.adapters.lightning",
        "spottrain.adapters.accelerate",
        "spottrain.checkpoint.stores.file_storage",
        "spottrain.engines.adopted",
        "spottrain.engines.ddp",
        "spottrain.engines.deepspeed",
        "spottrain.engines.fsdp",
        "spottrain_agent.command",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "deepspeed",
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3",
    )
)
# Steps of a busy machine are not long ones: where a test drains does not depend on its speed.
cast(Any, importlib.import_module("spottrain.world.listener")).LISTEN_AFTER_SECONDS = 600.0
# DeepSpeed asks a compiler which of its kernels it could build.
_ = importlib.import_module("deepspeed.ops").__compatible_ops__

# Collections leave out what is there by now, as in the agent's zygote. DeepSpeed collects garbage when it prepares a
# model, which would take half a second with all these objects.
gc.freeze()
gc.enable()
