"""What can go wrong with the images: every error says what is wrong and what to do about it."""

from __future__ import annotations


class ImageError(Exception):
    """Base of what this package raises on purpose; the command line prints it without a traceback."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  -> {remedy}")
        self.what = what
        self.remedy = remedy


class MissingProgram(ImageError):
    """A program of the machine is not installed, or the user may not run it."""


class StepFailed(ImageError):
    """debootstrap, buildah or containerd ended with an error."""


class UnknownImage(ImageError):
    """The named target does not exist or has not been built."""
