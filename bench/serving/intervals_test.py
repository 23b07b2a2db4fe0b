"""Quantiles, and ratios with their intervals."""

from __future__ import annotations

import random
import unittest

from intervals import Interval, quantile, ratio_of_medians


class IntervalsTest(unittest.TestCase):
    def test_quantile(self) -> None:
        values = [float(i) for i in range(1, 101)]
        random.Random(1).shuffle(values)
        self.assertEqual([50, 99, 100, 1], [quantile(values, share) for share in (0.5, 0.99, 1.0, 0.0)])
        self.assertEqual(7, quantile([7], 0.99))

    def test_ratio_has_its_interval_around_it(self) -> None:
        source = random.Random(2)
        found = ratio_of_medians([source.gauss(50, 5) for _ in range(60)], [source.gauss(100, 5) for _ in range(60)])
        self.assertLess(found.low, found.value)
        self.assertLess(found.value, found.high)
        self.assertLess(found.high - found.low, 0.1)

    def test_intervals_cover_the_true_ratio_about_as_often_as_they_say(self) -> None:
        source, covered = random.Random(3), 0
        for trial in range(60):
            values, base = [source.gauss(12, 2) for _ in range(40)], [source.gauss(10, 2) for _ in range(40)]
            found = ratio_of_medians(values, base, seed=trial)
            covered += found.low <= 1.2 <= found.high
        self.assertGreaterEqual(covered, 50)

    def test_pairs_leave_out_what_both_have(self) -> None:
        source = random.Random(4)
        drift = [100 * (1 + 0.5 * i / 40) for i in range(40)]
        base, values = [x + source.gauss(0, 1) for x in drift], [1.1 * x + source.gauss(0, 1) for x in drift]
        apart, paired = ratio_of_medians(values, base), ratio_of_medians(values, base, paired=True)
        self.assertEqual(apart.value, paired.value)
        self.assertLess(4 * (paired.high - paired.low), apart.high - apart.low)
        self.assertAlmostEqual(1.1, paired.value, delta=0.01)

    def test_equal_samples_give_one_without_width(self) -> None:
        self.assertEqual(Interval(1.0, 1.0, 1.0), ratio_of_medians([3.0] * 9, [3.0] * 9))

    def test_no_ratio_to_nothing(self) -> None:
        self.assertIsNone(ratio_of_medians([], [1.0]))
        self.assertIsNone(ratio_of_medians([1.0], []))
        self.assertIsNone(ratio_of_medians([1.0], [-1.0, 0.0, 1.0]))
        self.assertIsNone(ratio_of_medians([1.0], [-1.0, 1.0, 1.0]), "a drawn median of the base is negative")


if __name__ == "__main__":
    unittest.main()
