"""Keeps bitsandbytes out of the process that ranks are forked from.

That process imports this module before peft. PEFT imports bitsandbytes if it is installed. bitsandbytes loads torch's
compiler, which a rank must not do by itself.
"""

from __future__ import annotations

import sys
from typing import Any, cast

# An import that is None counts as not installed.
cast(dict[str, Any], sys.modules)["bitsandbytes"] = None
