"""Amounts of resources, as in a pod.

They are whole numbers, or text such as 500m and 16Gi.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

MAX_LENGTH = 64


def is_quantity(given: str) -> str:
    """The CEL test whether `given`, a whole number or text, is an amount."""
    return f"(type({given}) == int || isQuantity({given}))"


def as_quantity(given: str) -> str:
    """The CEL quantity of an amount, which `given` is."""
    return f"(type({given}) == int ? quantity('0').add({given}) : quantity({given}))"


def _read(value: object) -> object:
    """An amount as text, so that 8 and "8" mean the same job."""
    if isinstance(value, float | bool):
        raise ValueError(
            f"{str(value).lower()} is neither a whole number nor text; write an amount such as 500m, 8 or 16Gi"
        )
    return str(value) if isinstance(value, int) else value


def _schema(bound: str, message: str) -> WithJsonSchema:
    """The schema of an amount.

    The rule is the amount's own, so that the API server names the field and its value.
    """
    rule = f"{is_quantity('self')} && {as_quantity('self')}.compareTo(quantity('0')) {bound}"
    return WithJsonSchema(
        {
            "maxLength": MAX_LENGTH,
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [{"rule": rule, "message": message}],
        }
    )


_Text = Annotated[str, Field(max_length=MAX_LENGTH), BeforeValidator(_read)]
Quantity = Annotated[
    _Text, _schema(">= 0", "not a Kubernetes quantity of 0 or more; write one such as 500m, 8 or 16Gi (not 16GB)")
]
PositiveQuantity = Annotated[_Text, _schema("> 0", "not a Kubernetes quantity above 0; write one such as 64Gi")]
