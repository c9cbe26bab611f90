"""Mount paths without mounts: replaces them in text by the volumes' paths."""

import re
from collections.abc import Mapping


class PathRewriter:
    """Rewrites mount paths in variables, commands, arguments and working directories.

    A mount path counts if a path starts with it: at the start of the text, after `://`, or after a character that
    cannot be part of a path (`=`, `:`, a space, a quote). The path must end there or continue with `/`. So a mount at
    /data rewrites `--data=/data/train` and `file:///data`, but neither `/srv/data` nor `/data-old`. The longest mount
    path wins.
    """

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self._mounts = {path.rstrip("/"): real for path, real in mounts.items() if path.rstrip("/")}
        paths = sorted(self._mounts, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, paths)) or r"(?!)"
        self._pattern = re.compile(rf"(?:(?<=://)|(?<![\w./~)}}-]))({alternatives})(?=/|$|[^\w./~-])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._mounts[match[1]], text)
