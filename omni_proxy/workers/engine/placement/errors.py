"""The named faults of placement. Every bad input ends here, with a code for programs and a sentence for people."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """What is wrong with the input; the value is the code that is printed and tested."""

    LOADS_UNREADABLE = "loads_unreadable"
    LOADS_SHAPE = "loads_shape"
    LAYERS_MISSING = "layers_missing"
    LOADS_NOT_FINITE = "loads_not_finite"
    LOADS_NEGATIVE = "loads_negative"
    LAYER_WITHOUT_LOAD = "layer_without_load"
    TOO_FEW_SLOTS = "too_few_slots"
    TOO_MANY_SLOTS = "too_many_slots"
    RANKS_NOT_DIVISIBLE = "ranks_not_divisible"
    GROUPS_NOT_DIVISIBLE = "groups_not_divisible"
    REDUNDANCY_NOT_DIVISIBLE = "redundancy_not_divisible"
    BAD_OPTION = "bad_option"
    BAD_PLACEMENT = "bad_placement"


class PlacementError(ValueError):
    """An input that cannot be placed."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault
        self.detail = detail
