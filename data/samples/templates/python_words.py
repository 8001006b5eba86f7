"""More Python tasks on text: lists of words, comparisons of strings, and formats."""

from __future__ import annotations

import random
from typing import Any

from data.samples.templates.base import Template
from data.samples.templates.python_render import registrar
from data.samples.templates.python_strings import WORDS, sentence

TEMPLATES: list[Template] = []
task = registrar(TEMPLATES)


def with_prefix(rng: random.Random) -> tuple[Any, ...]:
    """Three strings that share a prefix, which may be empty."""
    prefix = rng.choice(["inter", "pre", "un", "over", "sub", ""])
    return ([prefix + end for end in rng.sample(["act", "view", "net", "heat", "due", "way", "come", "set"], 3)],)


def words(rng: random.Random) -> tuple[Any, ...]:
    """A list of words."""
    return (rng.choices(WORDS, k=rng.randint(3, 6)),)


@task(
    "shorten a text to a given length and add three dots if something was cut off",
    "Return text unchanged if it has at most limit characters. Otherwise return its first limit characters followed "
    "by '...'.",
    lambda rng: (*sentence(rng), rng.randint(5, 20)),
)
def truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


@task(
    "check whether two words are anagrams of each other",
    "Return True if the second word uses exactly the same letters as the first one, in any order and ignoring case.",
    lambda rng: (w := rng.choice(WORDS), "".join(rng.sample(w, len(w))) if rng.random() < 0.5 else rng.choice(WORDS)),
)
def same_letters(first: str, second: str) -> bool:
    return sorted(first.lower()) == sorted(second.lower())


@task(
    "count how often each word occurs in a sentence, ignoring case",
    "Return a dictionary that maps each lowercase word of the sentence to its number of occurrences.",
    lambda rng: (" ".join(rng.choices(WORDS[:4], k=rng.randint(3, 5))),),
)
def word_frequencies(sentence: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for w in sentence.lower().split():
        out[w] = out.get(w, 0) + 1
    return out


@task(
    "hide all but the last n characters of a string behind asterisks",
    "Return secret with every character except the last visible ones replaced by '*'.",
    lambda rng: ("".join(rng.choices("0123456789", k=rng.randint(4, 12))), rng.randint(1, 4)),
)
def mask_secret(secret: str, visible: int) -> str:
    return "*" * max(len(secret) - visible, 0) + secret[-visible:]


@task(
    "build an acronym from the first letters of the words in a phrase",
    "Return the first letter of each word of the phrase, in capitals and without spaces.",
    sentence,
)
def acronym(phrase: str) -> str:
    return "".join(w[0].upper() for w in phrase.split())


@task(
    "find the longest common prefix of a list of words",
    "Return the longest string that every word in the list starts with. It may be empty.",
    with_prefix,
)
def shared_prefix(words: list[str]) -> str:
    low, high = min(words), max(words)
    n = 0
    while n < min(len(low), len(high)) and low[n] == high[n]:
        n += 1
    return low[:n]


@task(
    "group a list of words by their first letter",
    "Return a dictionary from each first letter (lowercase) to the list of words that start with it, in their order.",
    words,
)
def by_first_letter(words: list[str]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for w in words:
        out.setdefault(w[0].lower(), []).append(w)
    return out


@task(
    "sort words by length and, for equal length, alphabetically",
    "Return the words sorted from shortest to longest. Words of the same length are in alphabetical order.",
    words,
)
def sort_by_length(words: list[str]) -> list[str]:
    return sorted(words, key=lambda w: (len(w), w))


@task(
    "count in how many positions two strings of the same length differ",
    "Return the number of positions at which the two strings have different characters. Both have the same length.",
    lambda rng: ("".join(rng.choices("ACGT", k=(n := rng.randint(3, 9)))), "".join(rng.choices("ACGT", k=n))),
)
def mismatches(first: str, second: str) -> int:
    return sum(a != b for a, b in zip(first, second, strict=True))


@task(
    "check whether a sentence uses every letter of a given set at least once",
    "Return True if each character of letters appears in the sentence.",
    lambda rng: (*sentence(rng), "".join(rng.sample("aeonrslt", rng.randint(2, 3)))),
)
def uses_all(sentence: str, letters: str) -> bool:
    return set(letters) <= set(sentence)


@task(
    "insert a separator after every n characters of a string",
    "Split text into groups of size characters from the left and join them with the separator.",
    lambda rng: ("".join(rng.choices("ABC0123", k=rng.randint(5, 12))), rng.randint(2, 4), rng.choice("-: /")),
)
def chunk_text(text: str, size: int, separator: str) -> str:
    return separator.join(text[i : i + size] for i in range(0, len(text), size))


@task(
    "merge two strings by taking characters from them in turn",
    "Alternate the characters of first and second, starting with first. When one of them ends, append what is left of "
    "the other.",
    lambda rng: (rng.choice(WORDS), rng.choice(WORDS)),
)
def interleave(first: str, second: str) -> str:
    n = min(len(first), len(second))
    return "".join(a + b for a, b in zip(first, second, strict=False)) + first[n:] + second[n:]


@task(
    "turn a title into a URL slug with lowercase words joined by hyphens",
    "Make a slug: lowercase the title, drop everything except letters, digits and spaces, and join words with '-'.",
    lambda rng: (" ".join(w.capitalize() for w in rng.sample(WORDS, 3)) + rng.choice(["!", "?", ": 2", "", "..."]),),
)
def slugify(title: str) -> str:
    return "-".join("".join(c for c in title.lower() if c.isalnum() or c == " ").split())


@task(
    "parse a query string such as 'a=1&b=2' into a dictionary",
    "Return a dictionary of the key=value pairs in query, which are separated by '&'. Values stay strings.",
    lambda rng: (
        "&".join(
            f"{k}={rng.randint(0, 50)}" for k in rng.sample(["page", "size", "id", "year", "x"], rng.randint(1, 3))
        ),
    ),
)
def parse_query(query: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in query.split("&"))


@task(
    "count the words in a text that have at least a given number of letters",
    "Return how many words of text are at least minimum characters long.",
    lambda rng: (*sentence(rng), rng.randint(4, 6)),
)
def count_long_words(text: str, minimum: int) -> int:
    return sum(len(w) >= minimum for w in text.split())


@task(
    "check whether a string reads the same backward, ignoring case and everything that is not a letter",
    "Return True if the letters of text form a palindrome. Ignore case, spaces and punctuation.",
    lambda rng: (
        rng.choice(
            [
                "Never odd or even",
                "Step on no pets",
                "Hello",
                "Was it a cat?",
                "Taco cat!",
                "Python",
                "A Toyota",
                "Top spot",
                "Moon",
                "No lemon, no melon",
                "Red rum",
                "Blue",
                "Level",
            ]
        ),
    ),
)
def letters_mirror(text: str) -> bool:
    letters = [c for c in text.lower() if c.isalpha()]
    return letters == letters[::-1]
