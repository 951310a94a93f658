"""Samples of unequal lengths, and who computes which: what bench/imbalance/imbalance_plan.h is for bench/imbalance/imbalance_torch.py.

Plans know lengths and costs, not speeds. LB-Micro and LB-Mini are those of ODC (arXiv 2601.19362;
github.com/sail-sg/odc, examples/llm_training/packing.py). Nothing but the standard library.
"""
from __future__ import annotations

import heapq
import math
import random
from typing import Callable, Sequence

SCALE = 32  # LongAlign's tokens for one of ours
SHORTEST, LONGEST = 256 // SCALE, 65_536 // SCALE
MEDIAN, SIGMA = 12_700 / SCALE, 1.0

Microbatch = list[int]  # samples
Plan = list[list[Microbatch]]  # by rank
Cost = Callable[[int], float]  # seconds of a sample of so many tokens


def sample_lengths(count: int, seed: int) -> list[int]:
    """Lognormal, of which only what lies between the shortest and the longest is drawn."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while len(lengths) < count:
        length = round(draw.lognormvariate(math.log(MEDIAN), SIGMA))
        if SHORTEST <= length <= LONGEST:
            lengths.append(length)
    return lengths


def rank_speeds(ranks: int, spread: float, seed: int) -> list[float]:
    """1 + spread * |normal|."""
    draw = random.Random(seed)
    return [1 + spread * abs(draw.gauss(0, 1)) for _ in range(ranks)]


def published_cost(tokens: int) -> float:
    """Of a model of 1.5B parameters, in units of its own: 1.982 s^2 + 2.612 s of s * 32,000 of LongAlign's tokens."""
    s = tokens * SCALE / 32_000
    return 1.982 * s * s + 2.612 * s


def partition(costs: Sequence[float], count: int, equal_counts: bool = False) -> list[list[int]]:
    """Parts of about equal cost, the heaviest first: Karmarkar and Karp, "The Differencing Method of Set Partitioning"
    (1982), then samples of the heaviest part are swapped as long as that helps. With equal counts: a multiple of
    `count` costs."""
    order = sorted(range(len(costs)), key=lambda sample: -costs[sample])
    at_once = count if equal_counts else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, begin in enumerate(range(0, len(order), at_once)):
        parts = [(costs[sample], [sample]) for sample in order[begin : begin + at_once]]
        push(heap, number, parts + [(0.0, [])] * (count - len(parts)))
    if not heap:
        return [[] for _ in range(count)]
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        push(heap, number, [(a + b, of_a + of_b) for (a, of_a), (b, of_b) in zip(one, reversed(other))])
    return improved(costs, [samples for _, samples in heap[0][2]])


def push(heap: list[tuple[float, int, list[tuple[float, list[int]]]]], number: int,
         parts: list[tuple[float, list[int]]]) -> None:
    parts.sort(key=lambda part: (-part[0], part[1]))
    heapq.heappush(heap, (parts[-1][0] - parts[0][0], number, parts))


def improved(costs: Sequence[float], parts: list[list[int]]) -> list[list[int]]:
    while True:
        parts.sort(key=lambda part: (-cost_of(part, costs), part))
        if not any(swapped(costs, parts[0], light) for light in reversed(parts[1:])):
            return parts


def swapped(costs: Sequence[float], heavy: list[int], light: list[int]) -> bool:
    """A sample of `heavy` with a cheaper one of `light`, where that makes the heavier of the two lighter."""
    of_heavy, of_light = cost_of(heavy, costs), cost_of(light, costs)
    for i, a in enumerate(heavy):
        for k, b in enumerate(light):
            moved = costs[a] - costs[b]
            if moved > 0 and max(of_heavy - moved, of_light + moved) < of_heavy * (1 - 1e-9):
                heavy[i], light[k] = b, a
                return True
    return False


def cost_of(samples: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[sample] for sample in samples)


def packed(samples: Sequence[int], count: int, costs: Sequence[float]) -> list[Microbatch]:
    """Into so many microbatches, the heaviest first."""
    parts = partition([costs[sample] for sample in samples], count)
    return [[samples[index] for index in part] for part in parts]


def fits(microbatches: Sequence[Microbatch], lengths: Sequence[int]) -> bool:
    return all(sum(lengths[sample] for sample in samples) <= LONGEST for samples in microbatches)


def packed_to_fit(groups: Sequence[Sequence[int]], lengths: Sequence[int], costs: Sequence[float]) -> Plan:
    """Each rank's samples into as many microbatches as every rank's, as few as none of more than LONGEST tokens."""
    for count in range(1, len(lengths) + 1):
        plan = [packed(samples, count, costs) for samples in groups]
        if all(fits(microbatches, lengths) for microbatches in plan):
            return plan
    raise ValueError(f"samples of more than {LONGEST} tokens: {max(lengths)}")


def plan_micro(lengths: Sequence[int], ranks: int, cost: Cost) -> Plan:
    """LB-Micro: equally many samples and microbatches on each rank, as collectives in every layer need. A multiple of
    `ranks` lengths."""
    costs = [cost(length) for length in lengths]
    return packed_to_fit(partition(costs, ranks, equal_counts=True), lengths, costs)


def plan_mini(lengths: Sequence[int], ranks: int, cost: Cost) -> Plan:
    """LB-Mini: unequal counts; each rank packs for itself."""
    costs = [cost(length) for length in lengths]
    found = partition(costs, ranks)
    if len(lengths) % ranks == 0:
        found = min(found, partition(costs, ranks, equal_counts=True), key=lambda parts: cost_of(parts[0], costs))
    return [packed_to_fit([samples], lengths, costs)[0] for samples in found]


def pull_order(lengths: Sequence[int]) -> list[int]:
    """The longest first."""
    return sorted(range(len(lengths)), key=lambda sample: -lengths[sample])


def meeting_time(seconds: Sequence[Sequence[float]]) -> float:
    """Of ranks that meet in each microbatch; seconds: by rank, then microbatch."""
    return sum(map(max, zip(*seconds, strict=True)))


def free_time(seconds: Sequence[Sequence[float]]) -> float:
    """Of ranks that meet at the end alone."""
    return max(map(sum, seconds))
