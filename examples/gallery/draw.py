"""Draw the data of docs/gallery.md into the folder ``gallery``: texts, windows of sensors, and a table.

Run it with ``python examples/gallery/draw.py``; it needs NumPy only, and draws the same data every time.
"""

import csv
import gzip
from pathlib import Path

import numpy as np

FOLDER = Path("gallery")
TOPICS = {
    "delivery": "parcel late courier address tracking arrived box street",
    "payment": "card refund invoice charged twice bank price receipt",
    "account": "password login email locked name profile reset code",
    "returns": "broken exchange size label send back wrong colour",
    "website": "page button error browser loading cart search slow",
}
SMALL_TALK = "hello please thanks my the order still again could you since today question help"
ACTIVITIES = {"sitting": (0.0, 0.05), "walking": (1.8, 0.6), "running": (2.8, 1.2), "stairs": (1.4, 0.9)}  # Hz, g
TOWNS = {"Aarhus": 3.1, "Bergen": 3.6, "Cork": 2.8, "Delft": 4.0, "Espoo": 3.3, "Faro": 1.9}  # thousands a square metre


def tickets(rng: np.random.Generator, count: int, path: Path) -> None:
    """Write short texts of five topics, a third of each its topic's words."""
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["label", "text"])
        for label in rng.integers(len(TOPICS), size=count):
            words = (
                rng.choice(SMALL_TALK.split(), 8).tolist()
                + rng.choice(list(TOPICS.values())[label].split(), 4).tolist()
            )
            rows.writerow([label, " ".join(rng.permutation(words))])


def walks(rng: np.random.Generator, per_person: int, people: int = 12) -> dict[str, np.ndarray]:
    """Windows of an accelerometer, (3, 64) at 20 Hz: everybody has a pace and a way to carry the phone."""
    time = np.arange(64) / 20
    x, y, client = [], [], []
    for person in range(people):
        pace, tilt = rng.normal(1, 0.08), rng.normal(0, 0.5, size=3)
        for label in rng.integers(len(ACTIVITIES), size=per_person):
            pitch, strength = list(ACTIVITIES.values())[label]
            steps = strength * np.sin(2 * np.pi * (pitch * pace * time + rng.random()))
            axes = np.stack([steps, 0.5 * np.roll(steps, 3), 0.3 * steps]) + tilt[:, None]
            x.append(axes + rng.normal(0, 0.4, size=axes.shape))
            y.append(label)
            client.append(person)
    return {"x": np.asarray(x, np.float32), "y": np.asarray(y), "client": np.asarray(client)}


def houses(rng: np.random.Generator, path: Path) -> None:
    """Write a table of houses; each town has a price of its own, and fewer or more houses than others."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["town", "area", "rooms", "age", "to_centre", "price"])
        for town, price in TOWNS.items():
            for _ in range(int(rng.integers(60, 240))):
                area, age, far = rng.normal(110, 30), rng.integers(0, 90), rng.exponential(4)
                value = price * max(area, 35) * (1 - 0.003 * age) * np.exp(-0.04 * far) / 100  # in 100,000
                numbers = (area, round(area / 28), age, far, value + rng.normal(0, 0.2))
                rows.writerow([town, *(f"{number:.2f}" for number in numbers)])


def notes(rng: np.random.Generator, path: Path) -> None:
    """Write messages of forty agents in one file; an agent has few or many, and topics of their own."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["agent", "text", "topic"])
        for agent in range(40):
            shares = rng.dirichlet(np.full(len(TOPICS), 0.5))
            for label in rng.choice(len(TOPICS), size=int(rng.geometric(0.015)), p=shares):
                topic, words = list(TOPICS.items())[label]
                drawn = [*rng.choice(SMALL_TALK.split(), 8), *rng.choice(words.split(), 3)]
                rows.writerow([f"agent {agent}", " ".join(rng.permutation(drawn)), topic])


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    (FOLDER / "tickets").mkdir(parents=True, exist_ok=True)
    tickets(rng, 3000, FOLDER / "tickets/train.csv.gz")
    tickets(rng, 600, FOLDER / "tickets/test.csv.gz")
    drawn = walks(rng, per_person=150)
    test = np.arange(len(drawn["y"])) % 5 == 0
    parts = {
        f"{key}_{part}": values[at] for key, values in drawn.items() for part, at in (("train", ~test), ("test", test))
    }
    np.savez_compressed(FOLDER / "walks.npz", **parts)
    houses(rng, FOLDER / "houses.csv")
    (FOLDER / "notes").mkdir(exist_ok=True)
    notes(rng, FOLDER / "notes/train.csv")
    print(f"written to {FOLDER}: tickets/train.csv.gz, tickets/test.csv.gz, walks.npz, houses.csv, notes/train.csv")
