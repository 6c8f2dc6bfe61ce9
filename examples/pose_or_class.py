"""Do features know the resolution? A network that finds joints beside one that tells front from back.

RAF's Figure 12 in small (Lim et al., 2025): the same transformer on the same drawn figures, at one resolution and with
no federation, once for heatmaps of joints, once for a class. ``python examples/pose_or_class.py`` writes t-SNE pictures
of both networks' features by the resolution they are shown, ``regression.png`` and ``classification.png``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import KeypointEstimator
from lit_fed.data import Puppets
from lit_fed.networks import build_network
from lit_fed.tasks.pose_pictures import features_figure

SIZES = [(32, 24), (48, 36), (64, 48), (128, 96)]
RIGHT, LEFT = 8, 9  # shoulders


class Facing(LightningModule):
    """Whether a figure is seen from the front: its right shoulder is on the picture's left.

    Args:
        network: Makes a feature map by ``forward_features``; its head is not used.
        channels: Of that map.
        lr: Learning rate of AdamW.
    """

    def __init__(self, network: nn.Module, channels: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.network, self.head, self.lr = network, nn.Linear(channels, 1), lr

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Cross-entropy of the class."""
        make: Any = self.network.forward_features
        front = batch["keypoints"][:, RIGHT, 0] < batch["keypoints"][:, LEFT, 0]
        found = self.head(make(batch["image"]).mean(dim=(2, 3))).squeeze(1)
        return F.binary_cross_entropy_with_logits(found, front.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)


def draw(folder: Path, epochs: int = 16, samples: int = 600, shown: int = 100) -> list[Path]:
    """Train both and write a picture of each one's features.

    Args:
        folder: Where to.
        epochs: Passes over the figures.
        samples: Figures to train on, all of the middle resolution.
        shown: Figures to look at, at all resolutions.
    """
    lightning.seed_everything(0, verbose=False)
    data = Puppets([(64, 48)], samples, shown, test_resolutions=SIZES, batch_size=8, test_batch_size=shown)
    shape = data.input_shape
    pose = KeypointEstimator(
        "pose_vit_tiny", lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05),
        num_joints=data.num_joints, flip_pairs=data.flip_pairs, input_shape=shape,
    )  # fmt: skip
    facing = Facing(build_network("pose_vit_tiny", data.num_joints, 3, shape))
    tasks: dict[str, Any] = {"regression": pose, "classification": facing}
    paths = []
    for name, task in tasks.items():
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_model_summary=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(task, datamodule=data)
        task.eval()
        with torch.no_grad():
            features = {
                view: task.network.forward_features(next(iter(data.test_loader(view=view)))["image"]).mean(dim=(2, 3))
                for view in data.views()
            }
        figure = features_figure({view: found.numpy() for view, found in features.items()})
        if figure is not None:
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1])
    return paths


if __name__ == "__main__":
    print(*draw(Path()), sep="\n")
