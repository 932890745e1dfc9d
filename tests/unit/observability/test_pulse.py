"""A step's age is the loop's doing, never that of whoever stopped the whole process."""

from __future__ import annotations

import time

from llmd.observability.pulse import Pulse


def test_the_age_of_a_step_grows_and_is_zero_when_idle() -> None:
    pulse = Pulse()
    assert pulse.step_age_s == 0.0
    pulse.begin()
    time.sleep(0.05)
    assert pulse.step_age_s >= 0.05
    pulse.end()
    assert (pulse.step_age_s, pulse.steps, pulse.phase) == (0.0, 1, "idle")


def test_time_in_which_everything_stood_still_is_forgiven() -> None:
    began = time.monotonic()
    pulse = Pulse(always=True)
    time.sleep(0.2)
    pulse.forgive(0.2)
    age = pulse.step_age_s
    assert age <= time.monotonic() - began - 0.2
    pulse.forgive(100)
    assert pulse.step_age_s == 0.0
