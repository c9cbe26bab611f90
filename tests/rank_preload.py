"""What the process that ranks and agents are forked from does before the first fork.

It imports what ranks import, and does once what each of them would do again at its start. It starts no thread and no
collective: a fork would not survive them.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import sys
from typing import Any, cast

from spottrain_agent.zygote import PRELOADED_MODULES, REQUIRED_MODULES, preload


def take_a_step_without_values() -> None:
    """torch keeps in the process what it finds out about the shapes and types of an optimizer's step."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in ((8, 8), (8,), (1, 8), (1,))]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.AdamW(parameters).step()


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
# torch asks all installed packages for backends before it makes a process group.
cast(Any, importlib.metadata).entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")
# FSDP takes such a step with shapes alone before each kind of real one.
take_a_step_without_values()

# Collections leave out what is there by now, as in the agent's zygote. DeepSpeed collects garbage when it prepares a
# model, which would take half a second with all these objects.
gc.freeze()
gc.enable()
