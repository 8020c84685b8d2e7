"""Kubernetes timestamps: second precision, as metav1.Time."""

from __future__ import annotations

from datetime import datetime


def parse_time(text: str | None) -> datetime | None:
    """A timestamp with its time zone. Raises `ValueError`."""
    return datetime.fromisoformat(text) if text else None


def timestamp(moment: datetime) -> str:
    """The API server keeps the strings of a custom resource as they are sent, so there is one spelling of a time."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
