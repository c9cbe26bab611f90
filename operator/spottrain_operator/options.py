"""Options that several programs of the operator's image take."""

from __future__ import annotations

import re

import click

from spottrain_api.wording import one_line

_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def _labels(_context: click.Context, option: click.Parameter, text: str) -> dict[str, str]:
    """Parse "key=value,key=value".

    Raises:
        click.BadParameter: It isn't such a list.
    """
    labels = dict(each.strip().partition("=")[::2] for each in text.split(",") if each.strip())
    for key, value in labels.items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise click.BadParameter(
                f"{one_line(f'{key}={value}')!r} is not a label with its value. Write key=value pairs with commas "
                "between them; the chart's value spotLabels is a map.",
                param=option,
            )
    return labels


spot_labels_option = click.option(
    "--spot-labels",
    envvar="SPOTTRAIN_SPOT_LABELS",
    default="",
    callback=_labels,
    help="Labels of spot nodes beside those that are known, such as example.com/capacity=spot,example.com/a=b.",
)
