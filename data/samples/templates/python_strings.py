"""Python tasks on text: reference functions whose results become the examples in the prompts."""

from __future__ import annotations

import random
from typing import Any

from data.samples.templates.base import Template
from data.samples.templates.python_render import registrar

TEMPLATES: list[Template] = []
task = registrar(TEMPLATES)
WORDS = [
    "apple",
    "river",
    "stone",
    "paper",
    "cloud",
    "garden",
    "silver",
    "window",
    "music",
    "yellow",
    "bottle",
    "forest",
    "summer",
    "pencil",
    "coffee",
    "orange",
    "planet",
    "letter",
    "button",
    "camera",
    "level",
    "noon",
    "radar",
    "banana",
    "kettle",
    "Python",
    "Monday",
    "Berlin",
    "small",
    "green",
    "quiet",
    "happy",
    "sunny",
    "lake",
    "moon",
]


def word(rng: random.Random) -> tuple[Any, ...]:
    """One word."""
    return (rng.choice(WORDS),)


def sentence(rng: random.Random) -> tuple[Any, ...]:
    """Two to six words."""
    return (" ".join(rng.choices(WORDS, k=rng.randint(2, 6))),)


def mixed(rng: random.Random) -> tuple[Any, ...]:
    """A short string of letters, digits and signs."""
    return ("".join(rng.choices("aabbcdeXYZ0123459 -_!", k=rng.randint(4, 12))).strip() or "a1",)


def runs(rng: random.Random) -> tuple[Any, ...]:
    """A string with runs of the same letter."""
    return ("".join(rng.choice("abcd") * rng.randint(1, 4) for _ in range(rng.randint(2, 5))),)


@task(
    "count the vowels in a string, ignoring case",
    "Return how many of the letters in text are vowels (a, e, i, o, u). Upper and lower case both count.",
    sentence,
)
def count_vowels_in(text: str) -> int:
    return sum(letter in "aeiou" for letter in text.lower())


@task(
    "capitalize every second word of a sentence",
    "Return the sentence with every second word (the 2nd, 4th, ...) in capital letters. Other words stay as they are.",
    sentence,
)
def shout_every_second(sentence: str) -> str:
    return " ".join(w.upper() if i % 2 else w for i, w in enumerate(sentence.split()))


@task(
    "convert a snake_case name to camelCase",
    "Convert an identifier from snake_case to camelCase. The first word starts with a small letter.",
    lambda rng: ("_".join(w.lower() for w in rng.sample(WORDS, rng.randint(1, 4))),),
)
def snake_to_camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


@task(
    "convert a camelCase name to kebab-case",
    "Turn a camelCase identifier into kebab-case: each capital letter becomes a hyphen and the small letter.",
    lambda rng: (
        "".join(w.lower() if i == 0 else w.capitalize() for i, w in enumerate(rng.sample(WORDS, rng.randint(2, 3)))),
    ),
)
def camel_to_kebab(name: str) -> str:
    return "".join("-" + c.lower() if c.isupper() else c for c in name)


@task(
    "compress a string by replacing each run of a repeated character with the character and its count",
    "Encode text with run-length encoding. A run of one character is written without a number.",
    runs,
)
def squeeze_runs(text: str) -> str:
    out, i = "", 0
    while i < len(text):
        j = i
        while j < len(text) and text[j] == text[i]:
            j += 1
        out += text[i] + (str(j - i) if j - i > 1 else "")
        i = j
    return out


@task(
    "expand a string such as 'a3b2' into 'aaabb'",
    "Decode a run-length encoded string in which every letter is followed by one digit, its number of repetitions.",
    lambda rng: ("".join(rng.choice("abcxyz") + str(rng.randint(1, 5)) for _ in range(rng.randint(1, 4))),),
)
def expand_runs(code: str) -> str:
    return "".join(code[i] * int(code[i + 1]) for i in range(0, len(code), 2))


@task(
    "find the longest word in a sentence, taking the first one if several are equally long",
    "Return the longest word of the sentence. If there is a tie, return the word that comes first.",
    sentence,
)
def longest_word_in(sentence: str) -> str:
    return max(sentence.split(), key=len)


@task(
    "reverse the order of the words in a sentence",
    "Return the words of the sentence in reverse order, separated by single spaces.",
    sentence,
)
def flip_words(sentence: str) -> str:
    return " ".join(reversed(sentence.split()))


@task(
    "reverse each word of a sentence but keep the order of the words",
    "Reverse the letters of each word. The words themselves stay in their places.",
    sentence,
)
def mirror_each_word(sentence: str) -> str:
    return " ".join(w[::-1] for w in sentence.split())


@task(
    "remove repeated characters from a string, keeping the first occurrence of each",
    "Return text without the characters that already appeared earlier in it.",
    word,
)
def drop_repeats(text: str) -> str:
    return "".join(dict.fromkeys(text))


@task(
    "find the first character of a string that does not repeat",
    "Return the first character that occurs exactly once in text, or an empty string if there is none.",
    lambda rng: runs(rng) if rng.random() < 0.4 else word(rng),
)
def first_unique_char(text: str) -> str:
    return next((c for c in text if text.count(c) == 1), "")


@task(
    "encrypt a lowercase text with a Caesar cipher of a given shift",
    "Shift each lowercase letter forward in the alphabet by shift places, wrapping from z to a. Other characters are "
    "left alone.",
    lambda rng: (sentence(rng)[0].lower(), rng.randint(1, 25)),
)
def caesar_shift(text: str, shift: int) -> str:
    return "".join(chr((ord(c) - 97 + shift) % 26 + 97) if c.islower() else c for c in text)


@task(
    "add up all single digits that appear in a string",
    "Return the sum of the digits in text. Characters that are not digits are ignored.",
    mixed,
)
def digit_total(text: str) -> int:
    return sum(int(c) for c in text if c.isdigit())


@task(
    "extract all whole numbers from a text as a list of integers",
    "Return the non-negative integers that appear in text, in order. Digits next to each other form one number.",
    lambda rng: (
        " ".join(rng.choice([rng.choice(WORDS), str(rng.randint(0, 250))]) for _ in range(rng.randint(3, 6))),
    ),
)
def numbers_in(text: str) -> list[int]:
    return [int(part) for part in text.split() if part.isdigit()]


@task(
    "check whether the brackets (), [] and {} in a string are balanced",
    "Return True if every opening bracket in text is closed by the matching bracket in the right order.",
    lambda rng: (
        rng.choice(
            [
                "()",
                "([]{})",
                "(]",
                "((a+b)*c",
                "{[x]}",
                "[(])",
                "",
                "a(b)c",
                "}{",
                "{(1, 2): [3]}",
                "(()",
                "[[]]()",
                "f(x[0])",
                "({)}",
            ]
        ),
    ),
)
def brackets_match(text: str) -> bool:
    stack = []
    for c in text:
        if c in "([{":
            stack.append(c)
        elif c in ")]}" and (not stack or "([{".index(stack.pop()) != ")]}".index(c)):
            return False
    return not stack


@task(
    "check whether a password is strong, meaning it has at least 8 characters, a digit, a small and a capital letter",
    "A password is strong if it has at least 8 characters, at least one digit, at least one lowercase letter and at "
    "least one uppercase letter. Return whether the given password is strong.",
    lambda rng: ("".join(rng.choices("abcdeFGH1239", k=rng.randint(5, 11))),),
)
def is_strong(password: str) -> bool:
    return (
        len(password) >= 8
        and any(c.isdigit() for c in password)
        and any(c.islower() for c in password)
        and any(c.isupper() for c in password)
    )
