"""Kubernetes quantities ("500m", "2Gi") as exact numbers."""

from decimal import ROUND_CEILING, Decimal, InvalidOperation

_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(1000),
    **{suffix: Decimal(1000) ** (i + 2) for i, suffix in enumerate("MGTPE")},
    **{suffix + "i": Decimal(1024) ** (i + 1) for i, suffix in enumerate("KMGTPE")},
}


def parse_quantity(text: str) -> Decimal:
    """Parse a quantity.

    Raises:
        ValueError: The text is not a quantity; the error is a sentence.
    """
    try:
        for length in (2, 1):
            if text[-length:] in _SUFFIXES:
                return Decimal(text[:-length]) * _SUFFIXES[text[-length:]]
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a quantity such as 500m or 2Gi.") from None


def divide_quantity(text: str, divisor: str) -> str:
    """Return `text` in units of `divisor`, rounded up, as resourceFieldRef does."""
    unit = parse_quantity(divisor or "1") or Decimal(1)
    return str((parse_quantity(text) / unit).to_integral_value(ROUND_CEILING))
