"""Keeps bitsandbytes out of the process that ranks are forked from; imported there before peft.

PEFT imports it if it is installed, and it loads torch's compiler, which a rank must not do by itself.
"""

from __future__ import annotations

import sys
from typing import Any, cast

# An import that is None counts as not installed.
cast(dict[str, Any], sys.modules)["bitsandbytes"] = None
