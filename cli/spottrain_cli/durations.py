"""Times in options of commands, such as 36h."""

from __future__ import annotations

import re

import click

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 24 * 3600.0}


class Duration(click.ParamType[float]):
    """A time such as 90s, 5m, 36h or 2d, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", str(value))
        if found is None:
            self.fail(f"{value} is no time. Write a number with s, m, h or d, as in 36h.", param, ctx)
        return float(found[1]) * _UNITS[found[2]]
