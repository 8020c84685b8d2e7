"""Quantities in the form the API server stores them in, so that a manifest can be compared with the live object.

Rules of k8s.io/apimachinery `resource.Quantity`: the largest suffix that leaves a whole number, no fraction kept below
10^-9, binary suffixes only from 1024 up, decimal exponents stay decimal exponents.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Decimal, localcontext

_SYNTAX = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(Ki|Mi|Gi|Ti|Pi|Ei)|(n|u|m|k|M|G|T|P|E)|)$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
NANO, MILLI = Decimal("1e-9"), Decimal("1e-3")
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


class NotAQuantity(ValueError):
    """Names the text and shows what would be right."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text!r} is not a quantity: write a number with an optional unit, such as 500m, 2 or 16Gi")


def parse(text: str) -> Decimal:
    """The amount in base units. Raises `NotAQuantity`."""
    match = _SYNTAX.match(text)
    if match is None:
        raise NotAQuantity(text)
    number, exponent, binary, decimal = match.groups()
    with localcontext() as context:
        context.prec = 60
        value = Decimal(number)
        if binary:
            return value * Decimal(1024 ** _BINARY[binary])
        return value.scaleb(int(exponent[1:]) if exponent else _DECIMAL[decimal or ""])


def canonical(text: str, finest: Decimal = NANO) -> str:
    """`text` as the API server gives it back: `1024Mi` is `1Gi`, `0.5` is `500m`. Raises `NotAQuantity`.

    What is finer than `finest` is rounded up to it: amounts in lists of resources are rounded to a thousandth.
    """
    value = parse(text)
    with localcontext() as context:
        context.prec = 60
        value = value.quantize(finest, rounding=ROUND_UP)
        if value == 0:
            return "0"
        match = _SYNTAX.match(text)
        if match and match.group(3) and abs(value) >= 1024 and value == value.to_integral_value():
            return _largest_binary(int(value))
        if match and match.group(2):
            exact = _largest_decimal(value, as_exponent=True)
            return text if text.lower() == exact else exact  # a capital E stays where nothing else changes
        return _largest_decimal(value, as_exponent=False)


def _largest_binary(value: int) -> str:
    for suffix, power in reversed(_BINARY.items()):
        if value % 1024**power == 0:
            return f"{value // 1024**power}{suffix}"
    return str(value)


def _largest_decimal(value: Decimal, *, as_exponent: bool) -> str:
    for suffix, power in reversed(_DECIMAL.items()):
        scaled = value.scaleb(-power)
        if scaled == scaled.to_integral_value():
            if as_exponent and power:
                return f"{int(scaled)}e{power}"
            return f"{int(scaled)}{suffix}"
    raise AssertionError("quantize leaves nothing below 10^-9")
