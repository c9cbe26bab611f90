"""Options of the programs in the operator's image: labels, namespaces and timings."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import partial

import click

from spottrain_operator.core.timing import Timing
from spottrain_runtime.wording import one_line

_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def _labels(_context: click.Context, option: click.Parameter, text: str) -> dict[str, str]:
    """Parse "key=value,key=value". A value may be empty.

    Raises:
        click.BadParameter: It isn't such a list.
    """
    labels = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, separator, value = pair.partition("=")
        if not (_KEY.fullmatch(key) and separator and _VALUE.fullmatch(value)):
            raise click.BadParameter(
                f"{one_line(pair)!r} is not a label with its value. Write key=value pairs with commas "
                "between them; in the chart's values, they are a map.",
                param=option,
            )
        labels[key] = value
    return labels


def _timing(_context: click.Context, option: click.Parameter, text: str) -> Timing:
    """Parse the durations that differ from the defaults, as JSON.

    Raises:
        click.BadParameter: It isn't an object of names and positive numbers.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    types = {each.name: each.type for each in fields(Timing)}
    if not isinstance(given, dict) or not all(
        name in types and isinstance(value, (int, float) if types[name] == "float" else int) and value > 0
        for name, value in given.items()
    ):
        raise click.BadParameter(
            f'{one_line(text)!r} is not a JSON object of fields of Timing, such as {{"growth_interval": 2.0}}.',
            param=option,
        )
    return Timing(**given)


_labels_option = partial(click.option, default="", callback=_labels)

# For tests and rehearsals alone: no value of the chart sets it, and --help doesn't show it.
timing_option = click.option("--timing", envvar="SPOTTRAIN_TIMING", default="{}", callback=_timing, hidden=True)
spot_labels_option = _labels_option(
    "--spot-labels",
    envvar="SPOTTRAIN_SPOT_LABELS",
    help="Labels of spot nodes beside those that are known, such as example.com/capacity=spot,example.com/a=b.",
)
pod_labels_option = _labels_option(
    "--pod-labels",
    envvar="SPOTTRAIN_POD_LABELS",
    help="Labels of the operator's pods, such as a=b,c=d. The one that leads is then labelled, for its Service.",
)
watch_labels_option = _labels_option(
    "--watch-labels",
    envvar="SPOTTRAIN_WATCH_LABELS",
    help="Labels of the namespaces whose jobs to lead, such as a=b,c=d. Default: all namespaces.",
)
watch_namespaces_option = click.option(
    "--watch-namespace",
    "watch_namespaces",
    envvar="SPOTTRAIN_WATCH_NAMESPACES",
    multiple=True,
    help="Namespace whose jobs to lead. Default: all, or those with --watch-labels.",
)
