"""Kubernetes timestamps: second precision, as metav1.Time."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_time(text: str | None) -> datetime | None:
    """A timestamp with its time zone. Raises `ValueError`."""
    return datetime.fromisoformat(text) if text else None


def timestamp(moment: datetime) -> str:
    """In UTC: the API server keeps the strings of a custom resource as they are sent."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
