"""Python tasks on numbers: reference functions whose results become the examples in the prompts."""

from __future__ import annotations

import math
import random
from typing import Any

from data.samples.templates.base import Template
from data.samples.templates.python_render import Draw, registrar

TEMPLATES: list[Template] = []
task = registrar(TEMPLATES)


def number(low: int, high: int) -> Draw:
    """A function that draws one integer."""
    return lambda rng: (rng.randint(low, high),)


def pair(low: int, high: int) -> Draw:
    """A function that draws two integers."""
    return lambda rng: (rng.randint(low, high), rng.randint(low, high))


def grades(rng: random.Random) -> tuple[Any, ...]:
    """A list of test scores."""
    return ([rng.randint(45, 100) for _ in range(rng.randint(3, 6))],)


def two_times(rng: random.Random) -> tuple[Any, ...]:
    """Two times of the same day, the earlier one first."""
    start = rng.randint(0, 1200)
    return tuple(f"{minutes // 60:02d}:{minutes % 60:02d}" for minutes in (start, start + rng.randint(1, 230)))


def prime(n: int) -> bool:
    """Whether n is a prime number."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


@task(
    "list all prime numbers below a limit",
    "Return the prime numbers smaller than limit in increasing order.",
    number(2, 45),
)
def primes_below(limit: int) -> list[int]:
    return [n for n in range(2, limit) if prime(n)]


@task(
    "find the smallest prime number greater than a given number",
    "Return the smallest prime that is strictly greater than n.",
    number(1, 200),
)
def next_prime(n: int) -> int:
    n += 1
    while not prime(n):
        n += 1
    return n


@task(
    "return the distinct prime factors of a positive integer in increasing order",
    "Return the different prime numbers that divide n, from small to large. For n = 1 the list is empty.",
    number(1, 400),
)
def distinct_prime_factors(n: int) -> list[int]:
    return [p for p in range(2, n + 1) if n % p == 0 and prime(p)]


@task(
    "compute the sum of the digits of an integer, ignoring its sign",
    "Return the sum of the decimal digits of n. The sign of a negative number is ignored.",
    number(-9999, 99999),
)
def sum_of_digits(n: int) -> int:
    return sum(map(int, str(abs(n))))


@task(
    "repeatedly add the digits of a number until a single digit is left",
    "Add the digits of n, then the digits of the result, and so on until only one digit remains. Return it.",
    number(10, 999999),
)
def digital_root(n: int) -> int:
    while n > 9:
        n = sum(map(int, str(n)))
    return n


@task(
    "reverse the digits of an integer, keeping its sign",
    "Return the integer whose digits are those of n in reverse order. A negative number stays negative.",
    number(-5000, 5000),
)
def reverse_integer(n: int) -> int:
    return int(str(abs(n))[::-1]) * (-1 if n < 0 else 1)


@task(
    "compute the greatest common divisor of two positive integers without using the math module",
    "Return the largest integer that divides both a and b. Use Euclid's algorithm.",
    pair(2, 150),
)
def common_divisor(a: int, b: int) -> int:
    return math.gcd(a, b)


@task(
    "compute the least common multiple of two positive integers",
    "Return the smallest positive integer that is a multiple of both a and b.",
    pair(2, 40),
)
def common_multiple(a: int, b: int) -> int:
    return math.lcm(a, b)


@task(
    "count the steps that the Collatz sequence needs to reach 1",
    "Starting from n, halve even numbers and replace an odd number k by 3k + 1. Return how many steps it takes to "
    "reach 1.",
    number(1, 60),
)
def collatz_steps(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


@task(
    "convert a positive integer to a Roman numeral",
    "Return n, with 1 <= n <= 3999, written as a Roman numeral.",
    number(1, 2100),
)
def roman_numeral(n: int) -> str:
    table = [
        (1000, "M"),
        (900, "CM"),
        (500, "D"),
        (400, "CD"),
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ]
    out = ""
    for value, letters in table:
        out += letters * (n // value)
        n %= value
    return out


@task(
    "convert a non-negative integer to a string in a given base from 2 to 9",
    "Return the digits of n written in the given base (2 to 9), most significant digit first.",
    lambda rng: (rng.randint(0, 300), rng.randint(2, 9)),
)
def to_base(n: int, base: int) -> str:
    digits = ""
    while n:
        n, digit = divmod(n, base)
        digits = str(digit) + digits
    return digits or "0"


@task(
    "count the ones in the binary form of a non-negative integer",
    "Return how many bits of n are set to 1.",
    number(0, 1000),
)
def ones_in_binary(n: int) -> int:
    return n.bit_count()


@task(
    "check whether a year is a leap year",
    "Years divisible by 4 are leap years, except those divisible by 100 but not by 400. Return whether year is one.",
    lambda rng: (rng.choice([1900, 2000, 2023, 2024, 1996, 2100, 1987, 2400, 2018, 1600, 1700, 2028]),),
)
def leap_year(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@task(
    "format a number of seconds as hours, minutes and seconds in the form HH:MM:SS",
    "Return seconds as a string 'HH:MM:SS' with two digits each.",
    number(0, 40000),
)
def format_duration(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


@task(
    "count the minutes between two times of the same day given as 'HH:MM'",
    "Both times are strings like '09:45'. Return the number of minutes from start to end; start is not after end.",
    two_times,
)
def minutes_between(start: str, end: str) -> int:
    (a, b), (c, d) = (map(int, t.split(":")) for t in (start, end))
    return (c - a) * 60 + d - b


@task(
    "turn a test score from 0 to 100 into a letter grade",
    "Return 'A' for 90 or more, 'B' for 80 to 89, 'C' for 70 to 79, 'D' for 60 to 69 and 'F' below 60.",
    number(40, 100),
)
def letter_grade(score: int) -> str:
    return "FFFFFFDCBAA"[score // 10]


@task(
    "compute the average of a list of scores after dropping the lowest one",
    "Remove one lowest score from the list and return the mean of the others, rounded to two decimals. The list has "
    "at least two scores.",
    grades,
)
def average_without_lowest(scores: list[int]) -> float:
    return round((sum(scores) - min(scores)) / (len(scores) - 1), 2)


@task(
    "compute the median of a list of numbers",
    "Return the middle value of the sorted numbers, or the mean of the two middle values if there is no single one.",
    grades,
)
def middle_value(numbers: list[int]) -> float:
    ordered, half = sorted(numbers), len(numbers) // 2
    return float(ordered[half]) if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@task(
    "give the fewest coins of 25, 10, 5 and 1 cents that add up to an amount",
    "Return the smallest number of coins (25, 10, 5 and 1 cents) that make up the given number of cents.",
    number(1, 199),
)
def fewest_coins(cents: int) -> int:
    count = 0
    for coin in (25, 10, 5, 1):
        count += cents // coin
        cents %= coin
    return count


@task(
    "check whether three side lengths can form a triangle",
    "Return True if a triangle with positive area can have the sides a, b and c.",
    lambda rng: tuple(rng.randint(1, 12) for _ in range(3)),
)
def is_triangle(a: int, b: int, c: int) -> bool:
    return a + b > c and a + c > b and b + c > a


@task(
    "sum all multiples of 3 or 5 below a limit",
    "Return the sum of the positive integers smaller than limit that are divisible by 3 or by 5.",
    number(1, 120),
)
def sum_multiples(limit: int) -> int:
    return sum(n for n in range(limit) if n % 3 == 0 or n % 5 == 0)


@task(
    "compute the nth term of a sequence that starts with 1, 2, 3 and in which each term is the sum of the three before",
    "The sequence starts 1, 2, 3, and every later term is the sum of the previous three. Return term n, counting "
    "from 0.",
    number(0, 16),
)
def three_term_sequence(n: int) -> int:
    terms = [1, 2, 3]
    while len(terms) <= n:
        terms.append(sum(terms[-3:]))
    return terms[n]


@task(
    "convert a temperature from Celsius to Fahrenheit, rounded to one decimal",
    "Return the temperature in degrees Fahrenheit (multiply by 9/5 and add 32), rounded to one decimal.",
    lambda rng: (rng.choice([rng.randint(-30, 45), rng.randint(-300, 400) / 10]),),
)
def to_fahrenheit(celsius: float) -> float:
    return round(celsius * 9 / 5 + 32, 1)


@task(
    "compute the balance of a savings account with yearly compound interest, rounded to cents",
    "Start with principal and add rate percent of interest each year for the given number of years. Return the final "
    "balance rounded to two decimals.",
    lambda rng: (100 * rng.randint(1, 20), rng.randint(1, 9), rng.randint(1, 6)),
)
def compound_balance(principal: int, rate: int, years: int) -> float:
    return round(principal * (1 + rate / 100) ** years, 2)


@task(
    "list all pairs of positive integers whose product is a given number",
    "Return all pairs (a, b) with a <= b and a * b == n, sorted by a.",
    number(4, 60),
)
def factor_pairs(n: int) -> list[tuple[int, int]]:
    return [(a, n // a) for a in range(1, math.isqrt(n) + 1) if n % a == 0]


@task(
    "check whether a number equals the sum of its proper divisors",
    "A number is perfect if its divisors other than itself add up to it. Return whether n is perfect.",
    lambda rng: (rng.choice([6, 28, 496, rng.randint(2, 100), rng.randint(2, 500)]),),
)
def equals_divisor_sum(n: int) -> bool:
    return n > 1 and sum(d for d in range(1, n) if n % d == 0) == n


@task(
    "round an amount of money in cents to the nearest 5 cents",
    "Return the multiple of 5 that is closest to cents.",
    number(1, 999),
)
def round_to_nickel(cents: int) -> int:
    return (cents + 2) // 5 * 5


@task(
    "compute the body mass index from weight in kilograms and height in meters, rounded to one decimal",
    "Return weight divided by the square of height, rounded to one decimal place.",
    lambda rng: (rng.randint(45, 110), rng.randint(150, 200) / 100),
)
def body_mass_index(weight: float, height: float) -> float:
    return round(weight / height**2, 1)


@task(
    "compute the distance between two points in the plane, rounded to two decimals",
    "Both points are (x, y) tuples. Return their straight-line distance rounded to two decimals.",
    lambda rng: ((rng.randint(-9, 9), rng.randint(-9, 9)), (rng.randint(-9, 9), rng.randint(-9, 9))),
)
def point_distance(first: tuple[int, int], second: tuple[int, int]) -> float:
    return round(math.dist(first, second), 2)


@task(
    "clamp a number to a range",
    "Return value if it lies between low and high, low if it is smaller and high if it is larger.",
    lambda rng: (rng.randint(-20, 40), rng.randint(-5, 5), rng.randint(8, 25)),
)
def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


@task(
    "count how many trailing zeros the factorial of a number has",
    "Return the number of zeros at the end of n! without computing the factorial.",
    number(0, 150),
)
def factorial_zeros(n: int) -> int:
    count = 0
    while n:
        n //= 5
        count += n
    return count
