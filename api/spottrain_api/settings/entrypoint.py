"""The program that ranks run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spottrain_api.settings.resource import Argument, Line, Resource


class Entrypoint(Resource):
    """The program that every rank runs: exactly one of `script` and `module`."""

    cel_rules = (
        (
            "has(self.script) != has(self.module)",
            "entrypoint: script and module are both set, or neither is; give exactly one of script (a path in the "
            "image) and module (as for python -m)",
        ),
    )
    script: Annotated[
        Line | None,
        Field(
            min_length=1,
            max_length=4096,
            description="Path of a Python file in the image, absolute or relative to workingDir. "
            "Default: none, as module is given instead.",
        ),
    ] = None
    module: Annotated[
        Line | None,
        Field(
            min_length=1,
            max_length=4096,
            description="Name of the Python module to run, as for `python -m`. "
            "Default: none, as script is given instead.",
        ),
    ] = None
    args: Annotated[
        tuple[Argument, ...],
        Field(max_length=1024, description="Command-line arguments of the program."),
    ] = ()
    working_dir: Annotated[
        Line | None,
        Field(
            max_length=4096,
            description="Folder in the image in which the program runs. Default: the working directory of the image.",
        ),
    ] = None
