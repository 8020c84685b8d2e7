"""What planning has to know of this machine's processor, read without torch."""

from __future__ import annotations

from hpu_engine.device.cpu.native import build
from hpu_engine.planning.cards import CARDS, Card, Processor


def read_processor() -> Processor:
    has = build.instruction_sets()
    return Processor.of(has, kernels_ahead=has >= build.AHEAD_NEEDS and build.ahead_path().exists())


def cpu_card() -> Card:
    """The card that a worker on this machine's processor is."""
    return CARDS["cpu"].model_copy(update={"processor": read_processor()})
