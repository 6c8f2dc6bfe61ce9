"""The pictures that a run wrote for TensorBoard, read back."""

from __future__ import annotations

from lit_fed.studies.cells import Cell

_PREFIX = "pictures/"


def pictures_of(cell: Cell) -> dict[str, bytes]:
    """The last of each of a run's pictures as PNG, by its name; none where it wrote no events.

    Args:
        cell: The run.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if cell.run is None or not any(cell.run.glob("events.out.tfevents.*")):
        return {}
    events = EventAccumulator(str(cell.run), size_guidance={"images": 1}).Reload()
    tags = [tag for tag in events.Tags()["images"] if tag.startswith(_PREFIX)]
    return {tag.removeprefix(_PREFIX): events.Images(tag)[-1].encoded_image_string for tag in tags}
