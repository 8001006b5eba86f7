"""The template type, the slot-filling helper that most categories use, and small text helpers.

A template is a name, a category and a function that turns a random generator into one user prompt.
Second turns come from the template's own follow-ups, or from its category's when it has none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Maker = Callable[[random.Random], str]


@dataclass(frozen=True)
class Template:
    """One family of prompts; `weight` scales how often it is drawn within its category."""

    name: str
    category: str
    make: Maker
    followups: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Person:
    """A first name with its pronouns."""

    name: str
    he: str
    his: str
    him: str

    @property
    def He(self) -> str:
        """The subject pronoun at the start of a sentence."""
        return self.he.capitalize()

    @property
    def His(self) -> str:
        """The possessive at the start of a sentence."""
        return self.his.capitalize()


_WOMEN = [
    "Anna",
    "Maya",
    "Priya",
    "Lena",
    "Sofia",
    "Grace",
    "Nora",
    "Aisha",
    "Clara",
    "Ines",
    "Hannah",
    "Ruth",
    "Mei",
    "Zoe",
    "Elif",
    "Carmen",
    "Tara",
    "Olga",
    "Fatima",
    "Joy",
    "Bella",
    "Naomi",
    "Ingrid",
    "Rosa",
    "Yuki",
    "Daphne",
    "Leila",
    "Violet",
    "Amara",
    "Petra",
]
_MEN = [
    "Omar",
    "Ben",
    "Lucas",
    "Diego",
    "Ravi",
    "Tom",
    "Kofi",
    "Hugo",
    "Sam",
    "Ivan",
    "Noah",
    "Felix",
    "Mateo",
    "Jonas",
    "Arjun",
    "Eli",
    "Pavel",
    "Marco",
    "Theo",
    "Kenji",
    "Oscar",
    "Dmitri",
    "Malik",
    "Peter",
    "Yusuf",
    "Callum",
    "Andre",
    "Leo",
    "Victor",
    "Nikhil",
]


def person(rng: random.Random) -> Person:
    """A random first name with fitting pronouns."""
    if rng.random() < 0.5:
        return Person(rng.choice(_WOMEN), "she", "her", "her")
    return Person(rng.choice(_MEN), "he", "his", "him")


def people(rng: random.Random, *, count: int) -> list[Person]:
    """`count` people with different names."""
    names = rng.sample(_WOMEN + _MEN, count)
    women = set(_WOMEN)
    return [Person(n, "she", "her", "her") if n in women else Person(n, "he", "his", "him") for n in names]


def slots(
    name: str,
    *,
    category: str,
    texts: Sequence[str],
    values: Mapping[str, Sequence[object]] | None = None,
    followups: Sequence[str] = (),
    weight: float = 1.0,
) -> Template:
    """A template that picks one of `texts` and fills each `{slot}` with one of its `values`."""
    choices = dict(values or {})

    def make(rng: random.Random) -> str:
        text = rng.choice(texts)
        return text.format(**{key: rng.choice(options) for key, options in choices.items()})

    return Template(name, category, make, tuple(followups), weight)


def usd(cents: int) -> str:
    """An amount of money, without the cents when they are zero."""
    dollars, rest = divmod(cents, 100)
    return f"${dollars:,}.{rest:02d}" if rest else f"${dollars:,}"


def listing(items: Sequence[str]) -> str:
    """Items joined as in running text: "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
