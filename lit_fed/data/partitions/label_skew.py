"""Partitions in which clients see different classes: shards, Dirichlet shares, a number of classes per client.

Other strata of a data set, such as quantiles of its targets, take the classes' place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.partitions.csr import CSR, ClientIndices, IntArray
from lit_fed.data.partitions.partition import (
    Partition,
    Samples,
    check_draws,
    check_enough,
    class_index,
    equal_sizes,
    shared_out,
    too_few,
)
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator


class Shards(Partition):
    """Every client gets s shards, each a contiguous chunk of one class's samples.

    With N clients and C classes, each class is cut into s·N/C shards of equal size. The list [0 … C−1] × shards is
    shuffled and reshaped to N×s, the class rows; each client draws a random remaining shard of each class on its row
    (a class may stand on a row twice). The same class rows serve the test split.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    arXiv:1602.05629, in the form that the public code of FedDr+ uses.

    Args:
        shards_per_client: s, the number of shards each client holds.

    Note:
        If a class's size is not a multiple of its number of shards, the first shards are larger by one, so that every
        sample is used exactly once.
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        check_range("Shards.shards_per_client", shards_per_client, least=1)
        self.shards_per_client = shards_per_client

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse settings that do not fit the samples.

        Raises:
            ConfigError: s·N is not a multiple of C, or a class has fewer samples than shards.
        """
        labels = samples.strata_for(self)
        num_classes = 1 + int(labels.max())
        rows = self._class_rows(num_classes, num_clients, seed)
        shards_per_class = rows.size // num_classes
        counts = np.bincount(labels, minlength=num_classes)
        if counts.min() < shards_per_class:
            raise ConfigError(
                f"class {counts.argmin()} has {counts.min()} training samples, too few for the {shards_per_class} "
                f"shards that Shards(shards_per_client={self.shards_per_client}) with data.num_clients={num_clients} "
                "makes of each class; lower either of the two"
            )
        return self._deal(labels, rows, num_classes, numpy_generator(seed, "partition", "shards", "train"))

    @override
    def split_test(self, train: CSR, train_samples: Samples, test_samples: Samples, seed: int) -> ClientIndices:
        """Shards of the test samples in the class rows of the training split."""
        train_labels, test_labels = train_samples.strata_for(self), test_samples.strata_for(self)
        num_classes = 1 + int(train_labels.max())
        rows = self._class_rows(num_classes, len(train), seed)
        return self._deal(test_labels, rows, num_classes, numpy_generator(seed, "partition", "shards", "test"))

    def _class_rows(self, num_classes: int, num_clients: int, seed: int) -> IntArray:
        """The class of each client's shards, shape (num_clients, shards_per_client)."""
        total = self.shards_per_client * num_clients
        if total % num_classes:
            raise ConfigError(
                f"partition.shards_per_client × data.num_clients is {self.shards_per_client} × {num_clients}; it must "
                f"be a multiple of {num_classes}, the number of classes"
            )
        rows = np.tile(np.arange(num_classes, dtype=np.int64), total // num_classes)
        numpy_generator(seed, "partition", "shards", "rows").shuffle(rows)
        return rows.reshape(num_clients, self.shards_per_client)

    @staticmethod
    def _deal(labels: IntArray, rows: IntArray, num_classes: int, generator: np.random.Generator) -> CSR:
        """Give every cell of the class rows a random shard of its class."""
        by_class = class_index(labels, num_classes)
        shards_per_class = rows.size // num_classes
        # The cells of class c, in the order in which clients draw, take its shards in random order: a permutation.
        cells = np.argsort(rows.ravel(), kind="stable").reshape(num_classes, shards_per_class)
        owners = np.empty(len(labels), dtype=np.int64)
        for label in range(num_classes):
            clients = generator.permutation(cells[label]) // rows.shape[1]
            owners[by_class[label]] = np.repeat(clients, equal_sizes(by_class.size(label), shards_per_class))
        owned = labels < num_classes  # test samples of untrained classes are unused
        return CSR.from_owners(np.flatnonzero(owned), owners[owned], rows.shape[0])


class Dirichlet(Partition):
    """Latent Dirichlet allocation: every class is spread over the clients in Dirichlet-distributed shares.

    Per class: shuffle the class's samples, draw p ~ Dir(α·1_N), set p_k = 0 for clients that already hold at least
    |D|/N samples, renormalise, cut by the cumulative sum. Redraw everything until the smallest client holds at
    least `min_samples`. The smaller α, the more unequal the clients.

    Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019,
    arXiv:1909.06335; with the cap and the restart of Wang et al., "Federated Learning with Matched Averaging",
    ICLR 2020, arXiv:2002.06440, as the public code of FedDr+ uses it.

    Args:
        alpha: α > 0, the concentration.
        min_samples: Least number of training samples of a client.
        max_retries: Number of draws before giving up; 50,000 samples of 10 classes take a millisecond.
        cap: Whether clients that already hold their share of the data get no more samples; False is the plain
            class-wise form, as in FedFrozen's paper (its Appendix C.1).

    Note:
        Draws come from NumPy's legacy ``RandomState(seed)``, so that seed 0 gives the client sizes of the splits that
        FedDr+'s authors ship for CIFAR-10 and CIFAR-100; seeds must be below 2**32. Their code draws without a limit.
        With α = 0.05, 10 classes and 100 clients it takes 6,446 draws.
    """

    def __init__(self, alpha: float = 0.5, min_samples: int = 10, max_retries: int = 10_000, cap: bool = True) -> None:
        check_draws("Dirichlet", alpha, min_samples, max_retries)
        self.alpha, self.min_samples, self.max_retries, self.cap = alpha, min_samples, max_retries, cap

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse settings that do not fit the samples.

        Raises:
            ConfigError: No draw gave every client `min_samples`.
        """
        labels = samples.strata_for(self)
        check_enough("Dirichlet", self.min_samples, num_clients, len(labels))
        if not 0 <= seed < 2**32:
            raise ConfigError(f"data.seed is {seed}; for Dirichlet it must be from 0 to 2**32 − 1")
        by_class = class_index(labels, 1 + int(labels.max()))
        random = np.random.RandomState(seed)
        smallest = 0
        for _ in range(self.max_retries):
            drawn = self._draw(by_class, num_clients, random)
            if drawn is not None:
                indices, sizes = drawn
                fewest = int(sizes.sum(axis=0).min())
                if fewest >= self.min_samples:
                    owners = np.repeat(np.tile(np.arange(num_clients), len(sizes)), sizes.ravel())
                    return CSR.from_owners(indices, owners, num_clients)
                smallest = max(smallest, fewest)
        name, remedy = f"Dirichlet(alpha={self.alpha})", "raise partition.alpha"
        raise ConfigError(too_few(name, remedy, num_clients, self.min_samples, self.max_retries, smallest))

    def _draw(self, by_class: CSR, num_clients: int, random: np.random.RandomState) -> tuple[IntArray, IntArray] | None:
        """One draw; None if the shares of a class underflow, with a tiny α.

        Returns:
            The samples, shuffled within each class, and the number of each class's samples that each client gets, shape
            (classes, num_clients).
        """
        total = len(by_class.indices)
        held, sizes = np.zeros(num_clients, np.int64), np.zeros((len(by_class), num_clients), np.int64)
        indices = by_class.indices.copy()
        for label in range(len(by_class)):
            start, stop = by_class.bounds(label)
            random.shuffle(indices[start:stop])
            shares = random.dirichlet(np.full(num_clients, self.alpha))
            if self.cap:
                shares = shares * (held < total / num_clients)
            mass = shares.sum()
            if start == stop:
                continue
            if not mass > 0:
                return None
            sizes[label] = shared_out(stop - start, shares / mass)
            held += sizes[label]
        return indices, sizes


class ClassesPerClient(Partition):
    """Every client holds exactly k distinct classes.

    Classes are dealt out evenly: clients choose one after the other, each the k classes chosen least so far, ties at
    random. The samples of a class are shuffled and dealt out evenly among the clients that chose it; or, with
    `samples_per_client`, each client draws that many from its classes, as evenly over them as possible, without
    repetition and independently of the others, so that clients may share samples.

    Args:
        k: Distinct classes per client.
        samples_per_client: Samples that each client draws independently; null deals out every sample at most once.

    Note:
        UWA (the source of the independent draw) does not publish its choice of classes; the even choice is ours. With
        shared samples, one client's held-out sample may be another's training sample.
    """

    def __init__(self, k: int = 2, samples_per_client: int | None = None) -> None:
        check_range("ClassesPerClient.k", k, least=1)
        check_range("ClassesPerClient.samples_per_client", samples_per_client, least=k, why=" (k)", null="for all")
        self.k, self.samples_per_client = k, samples_per_client

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse settings that do not fit the samples.

        Raises:
            ConfigError: There are fewer than k classes, or a class has too few samples for its clients.
        """
        labels = samples.strata_for(self)
        num_classes = 1 + int(labels.max())
        if self.k > num_classes:
            raise ConfigError(f"{type(self).__name__}.k is {self.k}, and the data have {num_classes} classes; lower it")
        by_class = class_index(labels, num_classes)
        chosen = self._choose(num_classes, num_clients, numpy_generator(seed, "partition", "classes"))
        clients_of = CSR.from_owners(np.repeat(np.arange(num_clients), self.k), chosen.ravel(), num_classes)
        if self.samples_per_client is None:
            generator = numpy_generator(seed, "partition", "classes", "deal")
            return self.deal(by_class, clients_of, num_clients, generator)
        indices = np.empty(num_clients * self.samples_per_client, dtype=np.int64)
        quotas = equal_sizes(self.samples_per_client, self.k)
        position = 0
        for client_id in range(num_clients):
            generator = numpy_generator(seed, "partition", "classes", "draw", client_id)
            for label, quota in zip(chosen[client_id], quotas, strict=True):
                pool = by_class[int(label)]
                if len(pool) < quota:
                    raise ConfigError(
                        f"class {label} has {len(pool)} training samples, and a client draws {quota} of it; "
                        "lower partition.samples_per_client or raise partition.k"
                    )
                indices[position : position + quota] = pool[generator.choice(len(pool), int(quota), replace=False)]
                position += int(quota)
        return CSR.from_sizes(indices, np.full(num_clients, self.samples_per_client, dtype=np.int64))

    def _choose(self, num_classes: int, num_clients: int, generator: np.random.Generator) -> IntArray:
        """The classes of each client, shape (num_clients, k)."""
        chosen = np.empty((num_clients, self.k), dtype=np.int64)
        times = np.zeros(num_classes)
        for client_id in range(num_clients):
            # A fraction below 1 breaks ties at random without changing the order of whole numbers.
            picks = np.argsort(times + generator.random(num_classes))[: self.k]
            times[picks] += 1
            chosen[client_id] = picks
        return chosen

    def pieces(self, total: int, parts: int, generator: np.random.Generator) -> IntArray:
        """Sizes of the pieces of a class with `total` samples for `parts` clients, shape (parts,)."""
        del generator
        return equal_sizes(total, parts)

    def deal(self, by_class: CSR, clients_of: CSR, num_clients: int, generator: np.random.Generator) -> CSR:
        """Deal every class out among the clients that chose it."""
        indices = by_class.indices.copy()
        owners = np.full(len(indices), -1, dtype=np.int64)
        for label in range(len(by_class)):
            start, stop = by_class.bounds(label)
            clients = clients_of[label]
            generator.shuffle(indices[start:stop])
            if len(clients) == 0:
                continue
            if stop - start < len(clients):
                raise ConfigError(
                    f"class {label} has {stop - start} training samples for the {len(clients)} clients that hold it; "
                    "lower data.num_clients or partition.k, or choose ClassesPerClient with samples_per_client"
                )
            owners[start:stop] = np.repeat(clients, self.pieces(stop - start, len(clients), generator))
        return CSR.from_owners(indices, owners, num_clients)


class Pathological(ClassesPerClient):
    """Every client holds exactly k distinct classes, in unequal numbers.

    Classes are chosen as by `ClassesPerClient`. Of the m clients that hold a class with n samples, each gets a number
    drawn uniformly from max(1, ⌊least·n/m⌋) … ⌊n/m⌋, and one of them, at random, gets the remainder, too.

    Zhang et al., "PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning Library and Benchmark",
    JMLR 2025, arXiv:2312.04992 (its pathological partition without balance).

    Args:
        k: Distinct classes per client.
        least: Least number of samples in a client's class, as a share of an equal part; 1 for equal parts.

    Note:
        PFLlib's code gives the first classes to the first clients, and the remainder to the last client of a class.
        Here a client's number has no influence.
    """

    def __init__(self, k: int = 2, least: float = 0.1) -> None:
        check_range("Pathological.k", k, least=1)
        check_range("Pathological.least", least, above=0, most=1)
        super().__init__(k)
        self.least = least

    @override
    def pieces(self, total: int, parts: int, generator: np.random.Generator) -> IntArray:
        smallest = max(1, int(self.least * total / parts))
        sizes = generator.integers(smallest, total // parts, parts, endpoint=True)
        sizes[generator.integers(parts)] += total - sizes.sum()
        return sizes


class ExtendedDirichlet(ClassesPerClient):
    """Every client holds samples of at most k classes, each spread over its clients in Dirichlet-distributed shares.

    Classes are chosen as by `ClassesPerClient`. With q_c in {0, 1}^N marking the clients that chose class c, its
    samples are shuffled and cut in the shares p_c ~ Dir(α·q_c). The shares are redrawn until the smallest client holds
    at least `min_samples`. With k the number of classes it is `Dirichlet` without a cap.

    Li and Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023,
    arXiv:2311.03154 (its extended Dirichlet strategy, ExDir(C, α)).

    Args:
        k: Distinct classes that a client may hold, the paper's C.
        alpha: α > 0, the concentration.
        min_samples: Least number of training samples of a client.
        max_retries: Number of draws before giving up.

    Note:
        The paper draws each client's classes independently, and its public code redraws them until every class has
        half of its average number of clients. Here they are chosen evenly: these numbers differ by at most one. A small
        α may leave a client without samples of a class that it chose.
    """

    def __init__(self, k: int = 2, alpha: float = 0.5, min_samples: int = 10, max_retries: int = 1000) -> None:
        check_range("ExtendedDirichlet.k", k, least=1)
        check_draws("ExtendedDirichlet", alpha, min_samples, max_retries)
        super().__init__(k)
        self.alpha, self.min_samples, self.max_retries = alpha, min_samples, max_retries

    @override
    def pieces(self, total: int, parts: int, generator: np.random.Generator) -> IntArray:
        return shared_out(total, generator.dirichlet(np.full(parts, self.alpha)))

    @override
    def deal(self, by_class: CSR, clients_of: CSR, num_clients: int, generator: np.random.Generator) -> CSR:
        """Deal until every client has enough.

        Raises:
            ConfigError: No draw gave every client `min_samples`.
        """
        check_enough("ExtendedDirichlet", self.min_samples, num_clients, len(by_class.indices))
        smallest = 0
        for _ in range(self.max_retries):
            cut = super().deal(by_class, clients_of, num_clients, generator)
            fewest = int(cut.sizes.min())
            if fewest >= self.min_samples:
                return cut
            smallest = max(smallest, fewest)
        name, remedy = f"ExtendedDirichlet(k={self.k}, alpha={self.alpha})", "raise partition.alpha or partition.k"
        raise ConfigError(too_few(name, remedy, num_clients, self.min_samples, self.max_retries, smallest))


class InnerDirichlet(Partition):
    """Clients of given sizes hold classes in Dirichlet-distributed proportions.

    With C classes, client k draws its proportions π_k ~ Dir(α·1_C) and then the class of each of its n_k samples from
    π_k. If clients draw more samples of a class than it has, random draws of them are kept and the others repeated
    without the class, with π_k renormalised. The smaller α, the fewer classes dominate a client; n_k does not depend on
    α. Samples beyond Σ n_k are unused.

    Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263; with the sizes of
    `LogNormal` its unbalanced data.

    Args:
        alpha: α > 0, the concentration.
        sizes: The number of samples of each client, or a partition whose sizes to take, such as `LogNormal`, `Quantity`
            or `SizeLaw`; null for equal sizes.

    Note:
        The paper's code, and ``flwr_datasets``, draw sample by sample, each for a random client that is not yet full.
        Here all clients draw at once, and again what was not to be had. The two agree in law until a class is
        exhausted.
    """

    def __init__(self, alpha: float = 0.5, sizes: Partition | list[int] | None = None) -> None:
        check_range("InnerDirichlet.alpha", alpha, above=0)
        if isinstance(sizes, list):
            for client_id, size in enumerate(sizes):
                check_range(f"InnerDirichlet.sizes[{client_id}]", size, least=1)
        self.alpha, self.sizes = alpha, sizes

    @override
    def count(self, own: Callable[[], int | None]) -> int | None:
        return len(self.sizes) if isinstance(self.sizes, list) else None

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse sizes that do not fit the samples.

        Raises:
            ConfigError: The number of sizes differs from the number of clients, or their sum exceeds the samples.
        """
        labels = samples.strata_for(self)
        left = self._sizes(samples, num_clients, seed)
        by_class = class_index(labels, 1 + int(labels.max()))
        generator = numpy_generator(seed, "partition", "inner_dirichlet")
        proportions = generator.dirichlet(np.full(len(by_class), self.alpha), num_clients)
        free, held = by_class.sizes, np.zeros((num_clients, len(by_class)), dtype=np.int64)
        while left.any():  # ends: what is not served has exhausted a class
            weights = proportions * (free > 0)
            weights[~(weights.sum(axis=1) > 0)] = free  # none of the client's classes is left
            drawn = generator.multinomial(left, weights / weights.sum(axis=1, keepdims=True))
            for label in np.flatnonzero(drawn.sum(axis=0) > free):
                drawn[:, label] = generator.multivariate_hypergeometric(
                    drawn[:, label], free[label], method="marginals"
                )
            left, free, held = left - drawn.sum(axis=1), free - drawn.sum(axis=0), held + drawn
        taken = [generator.permutation(by_class[label])[: held[:, label].sum()] for label in range(len(by_class))]
        owners = np.repeat(np.tile(np.arange(num_clients), len(by_class)), held.T.ravel())
        return CSR.from_owners(np.concatenate(taken), owners, num_clients)

    def _sizes(self, samples: Samples, num_clients: int, seed: int) -> IntArray:
        """Number of samples of each client, shape (num_clients,)."""
        if self.sizes is None:
            return equal_sizes(samples.size, num_clients)
        if isinstance(self.sizes, Partition):
            return self.sizes(samples, num_clients, seed).sizes
        if len(self.sizes) != num_clients:
            raise ConfigError(
                f"partition.sizes has {len(self.sizes)} sizes, and data.num_clients is {num_clients}; leave the number "
                "of clients out"
            )
        sizes = np.array(self.sizes, dtype=np.int64)
        if sizes.sum() > samples.size:
            raise ConfigError(
                f"partition.sizes sum to {sizes.sum()}, and there are {samples.size} training samples; lower them"
            )
        return sizes
