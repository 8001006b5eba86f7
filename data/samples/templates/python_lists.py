"""Python tasks on lists and dictionaries: reference functions whose results become the examples in the prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from data.samples.templates.base import Template
from data.samples.templates.python_render import Draw, registrar

TEMPLATES: list[Template] = []
task = registrar(TEMPLATES)
FRUIT = ["apple", "pear", "plum", "fig", "kiwi", "lime"]
ORDERS: list[Callable[[list[int]], list[int]]] = [sorted, lambda x: sorted(x, reverse=True), list]


def ints(low: int = -9, high: int = 20, *, least: int = 3, most: int = 7) -> Draw:
    """A function that draws one list of integers."""
    return lambda rng: ([rng.randint(low, high) for _ in range(rng.randint(least, most))],)


def with_number(draw: Draw, low: int, high: int) -> Draw:
    """A function that draws what `draw` draws and one more integer."""
    return lambda rng: (*draw(rng), rng.randint(low, high))


def two_lists(rng: random.Random) -> tuple[Any, ...]:
    """Two short lists of small integers."""
    return tuple([rng.randint(1, 9) for _ in range(rng.randint(2, 5))] for _ in range(2))


def stock(rng: random.Random) -> dict[str, int]:
    """A dictionary of fruit counts."""
    return {name: rng.randint(1, 20) for name in rng.sample(FRUIT, rng.randint(2, 4))}


def one_to_n_but_one(rng: random.Random) -> tuple[Any, ...]:
    """The numbers 1 to n in random order, without one of them."""
    numbers = list(range(1, rng.randint(4, 8) + 1))
    rng.shuffle(numbers)
    return (numbers[1:],)


def postfix(rng: random.Random) -> tuple[Any, ...]:
    """The tokens of a postfix expression with two or three numbers."""
    tokens = [str(rng.randint(1, 9)), str(rng.randint(1, 9)), rng.choice("+-*")]
    return ([*tokens, str(rng.randint(1, 9)), rng.choice("+-*")] if rng.random() < 0.5 else tokens,)


def grid(rng: random.Random) -> tuple[Any, ...]:
    """A small matrix."""
    columns = rng.randint(2, 3)
    return ([[rng.randint(0, 9) for _ in range(columns)] for _ in range(rng.randint(2, 3))],)


@task(
    "find the second largest distinct number in a list, or None if there is none",
    "Return the second largest of the different values in numbers, or None if there are fewer than two of them.",
    ints(1, 12, least=1),
)
def second_largest(numbers: list[int]) -> int | None:
    distinct = sorted(set(numbers))
    return distinct[-2] if len(distinct) > 1 else None


@task(
    "compute the running totals of a list of numbers",
    "Return a list whose entry i is the sum of the first i + 1 numbers.",
    ints(),
)
def running_totals(numbers: list[int]) -> list[int]:
    return [sum(numbers[: i + 1]) for i in range(len(numbers))]


@task(
    "rotate a list to the right by k places",
    "Return the list with every item moved k places to the right. Items "
    "that leave at the end come back at the front. k may be larger than the list.",
    with_number(ints(1, 9), 0, 8),
)
def rotate_right(items: list[int], k: int) -> list[int]:
    k %= len(items)
    return items[-k:] + items[:-k] if k else list(items)


@task(
    "split a list into chunks of a given size",
    "Return consecutive slices of items with size elements each. The last one may be shorter.",
    with_number(ints(1, 9, least=4, most=8), 2, 4),
)
def chunked(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


@task(
    "move all zeros of a list to its end while keeping the order of the other numbers",
    "Return a new list in which the zeros come last and all other numbers keep their order.",
    lambda rng: ([rng.choice([0, 0, rng.randint(1, 9), rng.randint(1, 9)]) for _ in range(rng.randint(3, 7))],),
)
def zeros_last(numbers: list[int]) -> list[int]:
    return [n for n in numbers if n] + [0] * numbers.count(0)


@task(
    "find all pairs of different positions in a list whose values add up to a target",
    "Return the index pairs (i, j) with i < j and numbers[i] + numbers[j] == target, in increasing order.",
    with_number(ints(1, 8, most=6), 6, 12),
)
def pairs_with_sum(numbers: list[int], target: int) -> list[tuple[int, int]]:
    return [
        (i, j) for i in range(len(numbers)) for j in range(i + 1, len(numbers)) if numbers[i] + numbers[j] == target
    ]


@task(
    "remove duplicates from a list while keeping the order of first appearance",
    "Return the items without repetitions, in the order in which each was first seen.",
    ints(1, 6, least=4),
)
def unique_in_order(items: list[int]) -> list[int]:
    return list(dict.fromkeys(items))


@task(
    "find the most common item of a list, choosing the smallest one in case of a tie",
    "Return the number that occurs most often. If several do, return the smallest of them.",
    ints(1, 5, least=4),
)
def most_common(numbers: list[int]) -> int:
    return min(set(numbers), key=lambda n: (-numbers.count(n), n))


@task(
    "merge two sorted lists into one sorted list without calling sort",
    "Both lists are sorted in increasing order. Return all their items in one sorted list.",
    lambda rng: tuple(sorted(part) for part in two_lists(rng)),
)
def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    return sorted(first + second)


@task(
    "return the items that two lists have in common, sorted and without repetitions",
    "Return a sorted list of the values that occur in both lists.",
    two_lists,
)
def shared_items(first: list[int], second: list[int]) -> list[int]:
    return sorted(set(first) & set(second))


@task(
    "find the largest sum of k neighboring items of a list",
    "Return the maximum sum of any k consecutive numbers. The list has at least k items.",
    with_number(ints(-5, 9, least=4), 2, 3),
)
def best_window_sum(numbers: list[int], k: int) -> int:
    return max(sum(numbers[i : i + k]) for i in range(len(numbers) - k + 1))


@task(
    "find the length of the longest run of increasing numbers in a list",
    "Return the length of the longest stretch of neighbors in which each number is greater than the one before.",
    ints(1, 15, least=4, most=8),
)
def longest_climb(numbers: list[int]) -> int:
    best = run = 1
    for a, b in itertools.pairwise(numbers):
        run = run + 1 if b > a else 1
        best = max(best, run)
    return best


@task("transpose a matrix given as a list of rows", "Return the matrix with rows and columns exchanged.", grid)
def flip_matrix(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


@task(
    "compute the sum of each column of a matrix",
    "Return a list with the sum of every column of the matrix, which is given as a list of rows.",
    grid,
)
def column_sums(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


@task(
    "flatten a list of lists into a single list",
    "Return all items of the inner lists in one flat list, in order.",
    lambda rng: ([[rng.randint(0, 9) for _ in range(rng.randint(0, 3))] for _ in range(rng.randint(2, 4))],),
)
def flatten_once(nested: list[list[int]]) -> list[int]:
    return [item for inner in nested for item in inner]


@task(
    "add up two dictionaries of counts",
    "Return a dictionary with the keys of both. The value of a key is the sum of "
    "its values in the two dictionaries; a missing key counts as 0.",
    lambda rng: (stock(rng), stock(rng)),
)
def add_counts(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in first | second}


@task(
    "swap the keys and values of a dictionary, collecting keys that share a value in a list",
    "Return a dictionary from each value to the list of keys that have it, in their order.",
    lambda rng: ({name: rng.randint(1, 3) for name in rng.sample(FRUIT, rng.randint(2, 4))},),
)
def invert(mapping: dict[str, int]) -> dict[int, list[str]]:
    out: dict[int, list[str]] = {}
    for key, value in mapping.items():
        out.setdefault(value, []).append(key)
    return out


@task(
    "return the names with the n highest scores, best first",
    "Scores maps names to points. Return the n names with the most points, from highest to lowest. Names with equal "
    "points are in alphabetical order.",
    lambda rng: (
        {name: rng.randint(1, 9) for name in rng.sample(["Ann", "Bob", "Cy", "Dee", "Eve"], 4)},
        rng.randint(1, 3),
    ),
)
def top_scores(scores: dict[str, int], n: int) -> list[str]:
    return sorted(scores, key=lambda name: (-scores[name], name))[:n]


@task(
    "compute the total value of an order from quantities and prices",
    "Order maps items to quantities and prices maps items to prices. Return the total price. Items without a price "
    "are ignored.",
    lambda rng: (
        {name: rng.randint(1, 9) for name in rng.sample(FRUIT, 2)},
        {name: rng.randint(1, 5) for name in rng.sample(FRUIT, 3)},
    ),
)
def order_total(order: dict[str, int], prices: dict[str, int]) -> int:
    return sum(count * prices.get(item, 0) for item, count in order.items())


@task(
    "find the missing number in a list that should hold every number from 1 to n",
    "The list holds the numbers 1 to n in any order, except for one of them. Return the missing one.",
    one_to_n_but_one,
)
def missing_number(numbers: list[int]) -> int:
    n = len(numbers) + 1
    return n * (n + 1) // 2 - sum(numbers)


@task(
    "separate a list of integers into even and odd numbers",
    "Return a tuple of two lists: the even numbers and the odd numbers, each in the original order.",
    ints(0, 30),
)
def split_even_odd(numbers: list[int]) -> tuple[list[int], list[int]]:
    return [n for n in numbers if n % 2 == 0], [n for n in numbers if n % 2]


@task(
    "compute the differences between neighboring items of a list",
    "Return the list of each number minus the number before it. A list with one item gives an empty list.",
    ints(0, 30, least=1),
)
def differences(numbers: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(numbers)]


@task(
    "check whether a list is sorted in increasing or decreasing order",
    "Return 'up' if the numbers never decrease, 'down' if they never increase, and 'neither' otherwise. Equal numbers "
    "throughout count as 'up'.",
    lambda rng: (rng.choice(ORDERS)([rng.randint(1, 12) for _ in range(rng.randint(3, 5))]),),
)
def direction(numbers: list[int]) -> str:
    if numbers == sorted(numbers):
        return "up"
    return "down" if numbers == sorted(numbers, reverse=True) else "neither"


@task(
    "merge overlapping intervals",
    "Each interval is a tuple (start, end). Return the merged intervals sorted by start. "
    "Intervals that touch or overlap become one.",
    lambda rng: ([(a := rng.randint(0, 12), a + rng.randint(1, 5)) for _ in range(rng.randint(2, 4))],),
)
def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


@task(
    "find the position of a number in a sorted list with binary search, returning -1 if it is absent",
    "The list is sorted and has no repetitions. Return the index of target, or -1 if it does not occur.",
    lambda rng: (sorted(rng.sample(range(1, 15), rng.randint(4, 7))), rng.randint(1, 14)),
)
def find_sorted(numbers: list[int], target: int) -> int:
    return numbers.index(target) if target in numbers else -1


@task(
    "find the largest profit from buying on one day and selling on a later day",
    "The list holds the price on each day. Return the largest gain from one purchase and one later sale, or 0 if no "
    "gain is possible.",
    ints(1, 20, least=3),
)
def best_profit(prices: list[int]) -> int:
    return max([b - a for i, a in enumerate(prices) for b in prices[i + 1 :]] + [0])


@task(
    "count the numbers in a list that are larger than both of their neighbors",
    "Return how many inner items are strictly greater than the item before and the item after.",
    ints(1, 12, least=4, most=8),
)
def count_peaks(numbers: list[int]) -> int:
    return sum(a < b > c for a, b, c in zip(numbers, numbers[1:], numbers[2:], strict=False))


@task(
    "simulate a robot that moves on a grid by the letters U, D, L and R",
    "The robot starts at (0, 0). U and D change y by +1 and -1, R and L change x by +1 and -1. Return its final "
    "position (x, y).",
    lambda rng: ("".join(rng.choices("UDLR", k=rng.randint(2, 9))),),
)
def robot_position(moves: str) -> tuple[int, int]:
    return moves.count("R") - moves.count("L"), moves.count("U") - moves.count("D")


@task(
    "apply a list of deposits and withdrawals to a balance, skipping withdrawals that would make it negative",
    "Start with balance and apply each change in order. Skip a change that would make the balance negative. Return the "
    "final balance.",
    lambda rng: (rng.randint(0, 50), [rng.randint(-40, 30) for _ in range(rng.randint(2, 5))]),
)
def apply_changes(balance: int, changes: list[int]) -> int:
    for change in changes:
        balance += change if balance + change >= 0 else 0
    return balance


@task(
    "evaluate an arithmetic expression in reverse Polish notation",
    "Tokens is a list of integers and the operators '+', '-' and '*' in postfix order. Return the value.",
    postfix,
)
def evaluate_postfix(tokens: list[str]) -> int:
    stack: list[int] = []
    for token in tokens:
        if token in "+-*":
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b}[token])
        else:
            stack.append(int(token))
    return stack[0]
