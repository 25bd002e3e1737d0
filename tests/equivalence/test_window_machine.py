"""The engine machine of `tests/property`, with windows alone and for longer: the fake runner looks at all that each
token sees, so a block that was given back too early, or found without what stands before it, raises.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import Phase, settings

from tests.property.test_scheduler import EngineMachine


class WindowMachine(EngineMachine):
    windows: ClassVar[list[int | None]] = [2, 3, 4, 5, 8, 9, 13, 30]


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None, phases=[Phase.generate])
