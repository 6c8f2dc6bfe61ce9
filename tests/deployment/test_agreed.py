"""What a server and its nodes must have been told alike."""

from __future__ import annotations

from lit_fed.deployment.agreed import agreed, difference


def test_what_a_schedule_by_steps_spans_is_the_same_everywhere() -> None:
    node, server = agreed("trainer: {schedule_steps: run}"), agreed("trainer: {schedule_steps: round}")
    assert difference(node, server) == 'trainer.schedule_steps is "run" on the node and "round" on the server'
    assert difference(node, node) is None
