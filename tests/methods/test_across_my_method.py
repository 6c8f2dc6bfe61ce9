"""The example of a method of one's own, with the four proofs that every method here has."""

from pathlib import Path
from typing import Any

from examples.my_method import Anchored
from lit_fed.methods import FedAvg
from tests.support import Points, Wanderer, assert_same, fit, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    # As in tests/methods/test_fedavg.py, round 0 gives the mean (0.25, 1.5), so v = w = (0.25, 1.5), and round 1 the
    # mean (0.46875, 2.4375); v = ½·(0.25, 1.5) + (0.21875, 0.9375) = (0.34375, 1.6875) and w = (0.59375, 3.1875).
    made = fit(tmp_path, algorithm=Anchored(mu=0.0, momentum=0.5), max_rounds=2)
    assert weights(made)["network.weight"].tolist() == [[0.59375, 3.1875]]


def test_without_its_terms_it_is_fedavg(tmp_path: Path) -> None:
    both = (FedAvg(), Anchored(mu=0.0, momentum=0.0))
    assert_same(*(weights(fit(tmp_path, algorithm=one, max_rounds=3, local_epochs=2)) for one in both))


def test_it_resumes_where_it_was(tmp_path: Path) -> None:
    module = Wanderer().state_dict()  # batch norm's buffers have no velocity

    def run(folder: str, rounds: int, ckpt_path: str | None = None) -> Any:
        task = Wanderer(lr=0.05)
        task.load_state_dict(module)
        parts = (task, Points(sizes=(2, 3)), Anchored(mu=0.1))
        return fit(tmp_path / folder, *parts, max_rounds=rounds, ckpt_path=ckpt_path, local_epochs=2)

    whole = run("whole", 5)
    run("parts", 2)
    assert_same(weights(whole), weights(run("parts", 5, "last")))
