"""A run's pictures, read from its TensorBoard events."""

from __future__ import annotations

from lit_fed.studies.running.cells import Cell

_PREFIX = "pictures/"


def pictures_of(cell: Cell) -> dict[str, bytes]:
    """Return the last version of each picture as PNG by name; empty without events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if cell.run is None or not any(cell.run.glob("events.out.tfevents.*")):
        return {}
    events = EventAccumulator(str(cell.run), size_guidance={"images": 1}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith(_PREFIX)]
    return {tag.removeprefix(_PREFIX): events.Images(tag)[-1].encoded_image_string for tag in tags}
