"""Quantities in the API server's canonical form; the cases are what a 1.37 API server stores for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpu_operator.domain.quantity import NotAQuantity, canonical, parse


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("1024Mi", "1Gi"), ("2048Mi", "2Gi"), ("2Gi", "2Gi"), ("1536Mi", "1536Mi"), ("1000m", "1"),
        ("0.5", "500m"), ("1e3", "1e3"), ("1000", "1k"), ("1500", "1500"), ("0", "0"), ("0Mi", "0"),
        ("100Mi", "100Mi"), ("1.5Gi", "1536Mi"), ("8", "8"), ("12e6", "12e6"), ("1E3", "1E3"), ("1000E3", "1e6"),
        ("0.0001", "100u"), ("1Ki", "1Ki"), ("512", "512"), ("1e-3", "1e-3"), ("0.5Ki", "512"),
        ("1000Ki", "1000Ki"), ("+1", "1"), ("1.", "1"), (".5", "500m"), ("1M", "1M"), ("5000000", "5M"),
    ],
)  # fmt: skip
def test_canonical_form(written: str, stored: str) -> None:
    assert canonical(written) == stored


@pytest.mark.parametrize("text", ["lots", "", "1 Gi", "1gi", "Gi", "1e", "--1", "1Gi2", "0x10", "1K"])
def test_what_is_not_a_quantity_is_named(text: str) -> None:
    with pytest.raises(NotAQuantity, match=r"is not a quantity: write a number"):
        canonical(text)


@given(st.integers(0, 10**15), st.sampled_from(["", "m", "k", "M", "Ki", "Mi", "Gi", "e3", "e6"]))
def test_the_canonical_form_is_the_same_amount_and_its_own_canonical_form(number: int, suffix: str) -> None:
    written = f"{number}{suffix}"
    assert parse(canonical(written)) == parse(written)
    assert canonical(canonical(written)) == canonical(written)
