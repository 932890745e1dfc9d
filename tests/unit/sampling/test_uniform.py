"""The numbers behind random sampling."""

from __future__ import annotations

import numpy as np

from llmd.sampling.uniform import uniform


def test_a_number_depends_on_seed_and_position_alone() -> None:
    together = uniform([7, 7, 8, 2**63 - 1], [0, 1, 0, 5])
    alone = [uniform([seed], [position])[0] for seed, position in [(7, 0), (7, 1), (8, 0), (2**63 - 1, 5)]]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_below_one_and_uniform_along_positions_and_along_seeds() -> None:
    count = 50_000
    for numbers in (uniform([3] * count, range(count)), uniform(range(count), [0] * count)):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed with probability 0.999, and the input is fixed.
        distance = np.abs(np.sort(numbers) - (np.arange(count) + 0.5) / count).max()
        assert distance < 1.95 / count**0.5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
