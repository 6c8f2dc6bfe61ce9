"""Pictures of what a generator makes."""

import numpy as np
import pytest

from lit_fed.methods.data_free.display import generated_picture


@pytest.mark.parametrize(("channels", "shape"), [(1, (15, 15)), (2, (15, 15)), (3, (15, 15, 3))])
def test_images_stand_in_a_row_for_each_class(channels: int, shape: tuple[int, ...]) -> None:
    # 3 classes of 3 images, 4×4 pixels and a line of one pixel between them: 3·5 by 3·5.
    images = np.arange(3 * 3 * channels * 16, dtype=np.float32).reshape(3, 3, channels, 4, 4)
    (shown,) = generated_picture(images).axes[0].images
    array = shown.get_array()
    assert array is not None
    assert array.shape == shape
    # Class 1, image 2: from its smallest value to its largest, over its channels that are shown.
    block = np.asarray(array)[5:9, 10:14]
    assert (block.min(), block.max()) == (0.0, 1.0)
