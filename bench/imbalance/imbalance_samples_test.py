#!/usr/bin/env python3
"""The plans are those of imbalance_plan.h."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "bench/imbalance"))
from imbalance_samples import (  # noqa: E402
    LONGEST, SHORTEST, cost_of, free_time, meeting_time, partition, plan_micro, plan_mini, published_cost, pull_order,
    rank_speeds, sample_lengths)

RANKS, SAMPLES = 4, 32


def sums(parts, costs):
    return [cost_of(part, costs) for part in parts]


def planned(plan):
    return sorted(sample for of_rank in plan for samples in of_rank for sample in samples)


class PartitionTest(unittest.TestCase):
    def test_the_textbooks_numbers(self):
        costs = [8, 7, 6, 5, 4]  # differencing alone ends with 16 and 14, a swap of 8 and 7 mends it
        self.assertEqual(sums(partition(costs, 2), costs), [15, 15])

    def test_equal_counts(self):
        self.assertEqual(sums(partition([8, 7, 2, 1], 2, True), [8, 7, 2, 1]), [9, 9])
        self.assertEqual(sums(partition([9, 1, 1, 1], 2, True), [9, 1, 1, 1]), [10, 2])
        self.assertEqual(sums(partition([9, 1, 1, 1], 2), [9, 1, 1, 1]), [9, 3])

    def test_nothing(self):
        self.assertEqual(partition([], 2), [[], []])


class PlanTest(unittest.TestCase):
    def test_micro_has_equal_counts_within_the_limit(self):
        for seed in range(50):
            lengths = sample_lengths(SAMPLES, seed)
            plan = plan_micro(lengths, RANKS, published_cost)
            self.assertEqual({len(of_rank) for of_rank in plan}, {len(plan[0])})
            self.assertEqual({sum(map(len, of_rank)) for of_rank in plan}, {SAMPLES // RANKS})
            self.assertLessEqual(max(cost_of(samples, lengths) for of_rank in plan for samples in of_rank), LONGEST)
            self.assertEqual(planned(plan), list(range(SAMPLES)))

    def test_mini_is_no_slower_than_micro(self):
        for seed in range(50):
            lengths = sample_lengths(SAMPLES, seed)
            plan = plan_mini(lengths, RANKS, published_cost)
            self.assertEqual(planned(plan), list(range(SAMPLES)))
            costs = [published_cost(length) for length in lengths]
            mini = [sums(of_rank, costs) for of_rank in plan]
            micro = [sums(of_rank, costs) for of_rank in plan_micro(lengths, RANKS, published_cost)]
            self.assertLessEqual(free_time(mini), meeting_time(micro))
            self.assertGreaterEqual(free_time(mini), sum(costs) / RANKS * (1 - 1e-12))

    def test_times(self):
        self.assertEqual(meeting_time([[6, 2], [4, 2]]), 8)
        self.assertEqual(free_time([[6], [4, 2, 2]]), 8)

    def test_the_longest_is_pulled_first(self):
        self.assertEqual(pull_order([300, 900, 300, 1000]), [3, 1, 0, 2])


class SamplesTest(unittest.TestCase):
    def test_lengths_are_the_truncated_laws(self):
        lengths = sorted(sample_lengths(20_000, 1))
        self.assertEqual(lengths, sorted(sample_lengths(20_000, 1)))
        self.assertTrue(SHORTEST <= lengths[0] and lengths[-1] <= LONGEST)
        self.assertAlmostEqual(lengths[10_000] * 32, 11_900, delta=400)
        self.assertAlmostEqual(sum(lengths) / 20_000 * 32, 16_300, delta=400)

    def test_speeds(self):
        self.assertEqual(rank_speeds(3, 0, 7), [1, 1, 1])
        self.assertGreaterEqual(min(rank_speeds(1000, 0.15, 7)), 1)

    def test_the_published_cost(self):
        self.assertAlmostEqual(published_cost(1000), 1.982 + 2.612)


if __name__ == "__main__":
    unittest.main()
