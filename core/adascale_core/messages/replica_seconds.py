"""Where the time of replicas goes: each second of a pod has one cause."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """What a replica spends its time on, from the start of its pod to its end."""

    USEFUL = "useful"
    """Steps, with what the program does between them, times the efficiency of their batch."""
    EFFICIENCY_LOST = "efficiency_lost"
    """The rest of these steps: what a larger batch wastes."""
    EXCHANGE = "exchange"
    """Waiting for the gradients of others, where computation does not hide it."""
    CHANGE = "change"
    """Standing still while the replicas change."""
    DETECTION = "detection"
    """Waiting for a lost replica, until its loss is noticed."""
    REPEATED = "repeated"
    """Steps that are not kept, and steps that were made before and are made again."""
    STARTING = "starting"
    """From the start of the pod, or of another trainer, to its first step; waiting for others to start."""
    CHECK = "check"
    """The check of the device and of the connections before a replica joins."""
    SPARE = "spare"
    """Waiting as a spare."""
    EVALUATION = "evaluation"
    """Evaluations of the trainer."""
    CHECKPOINT = "checkpoint"
    """Checkpoints, as far as training waits for them."""
    PROGRAM = "program"
    """What the program does outside of its data loops, and the end of its process."""


ReplicaSeconds = Mapping[str, float]
"""Seconds by cause; a cause that is not there has none."""
