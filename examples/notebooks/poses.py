# %% [markdown]
# # Poses on photographs
#
# Two cameras see persons at two resolutions, and one network finds the joints at all of them, also at resolutions that
# no camera has. The photographs are drawn puppets: no persons, no files. For a folder of your own photographs replace
# `Puppets` by `ClientPoses`, as the page on key points says.

# %%
# %pip install lit-fed

# %%
import matplotlib.pyplot as plt
import torch
from lightning import seed_everything

from lit_fed import FederatedTrainer
from lit_fed.data import IID
from lit_fed.methods import FedRAF
from lit_fed.poses import KeypointEstimator, Puppets

seed_everything(0, verbose=False)
data = Puppets(
    resolutions=[(48, 36), (32, 24)],
    clients_per_level=[1, 1],
    samples_per_client=60,
    test_samples=60,
    test_resolutions=[(16, 12), (32, 24), (48, 36), (64, 48)],
    partition=IID(),
    batch_size=8,
)
model = KeypointEstimator(
    "pose_cnn",
    lambda parameters: torch.optim.AdamW(parameters, lr=0.002, weight_decay=0.05),
    num_joints=data.num_joints,
    flip_pairs=data.skeleton.flip_pairs,
    input_shape=data.input_shape,
)

# %% [markdown]
# RAF trains each client at its own resolution and all lower ones, and ties the heatmaps together. Six short rounds show
# how it works; the run of the page on key points has twenty, with more puppets.

# %%
trainer = FederatedTrainer(
    max_rounds=6, local_epochs=3, evaluate_every=6, gradient_clip_val=1.0, accelerator="cpu", devices=1,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(model, data, FedRAF(alpha=0.3, truth="top"))

# %% [markdown]
# PCK is the share of joints, in percent, that are found within half a head of their place; at two of these
# resolutions nobody trained.

# %%
for height, width in data.test_resolutions:
    print(f"{height}×{width} pixels: PCK {trainer.metrics[f'global/pck_{height}x{width}']:.1f}")

# %% [markdown]
# Six test puppets and where the network finds their joints.

# %%
images = next(iter(data.test_loader()))["image"][:6]
with torch.no_grad():
    joints = model.eval().predict_step(images, 0)["keypoints"]
figure, axes = plt.subplots(1, 6, figsize=(9, 2.2), layout="constrained")
for place, image, found in zip(axes, images, joints, strict=True):
    place.imshow(((image - image.min()) / (image.max() - image.min())).permute(1, 2, 0))
    place.scatter(found[:, 0], found[:, 1], s=8, c="red")
    place.axis("off")
