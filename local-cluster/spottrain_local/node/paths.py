"""Mount paths without mounts: text that names a mount path is rewritten to where the volume really is."""

import re
from collections.abc import Mapping


class PathRewriter:
    """Rewrites mount paths in environment values, commands, arguments and working directories.

    A mount path counts where it stands at the start of a path: at the start of the text, after a character
    that can't be part of a path before it (`=`, `:`, a space, a quote), or after `://`; and where the path
    ends or goes on with `/`. So `--data=/data/train` and `file:///data` are rewritten for a mount at /data,
    `/srv/data` and `/data-old` are not. The longest mount path wins.
    """

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self._mounts = {path.rstrip("/"): real for path, real in mounts.items() if path.rstrip("/")}
        paths = sorted(self._mounts, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, paths)) or r"(?!)"
        self._pattern = re.compile(rf"(?:(?<=://)|(?<![\w./~)}}-]))({alternatives})(?=/|$|[^\w./~-])")

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._mounts[match[1]], text)
