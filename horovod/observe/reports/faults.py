"""Name what can be wrong with a job, for the modules that give advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """A kind of advice, with the least share of the run that it must cost to be given.

    Even a job without any fault loses something to each of them: to chance, to the operating
    system, and to the recording itself.
    """

    LONG_STEPS = "long steps", 0.03
    SLOW_RANKS = "slow ranks", 0.05
    CORES = "no cores", 0.10
    TURNS = "late in turn", 0.10
    INPUT = "input", 0.06
    SMALL_OPERATIONS = "small operations", 0.05
    NETWORK = "network", 0.06
    EXCHANGE = "exchange", 0.20
    NEGOTIATION = "negotiation", 0.10

    def __init__(self, _: str, worth: float) -> None:
        self.worth = worth


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    fault: Fault
    subject: str
    number: str  # what was measured
    action: str
    cost: float  # microseconds of the recording that the fault costs, at most
