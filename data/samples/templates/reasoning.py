"""Riddles, logic puzzles, comparisons and other short reasoning tasks."""

from __future__ import annotations

import random
from functools import partial

from data.samples.templates.base import Template, people, slots

FOLLOWUPS = (
    "Are you sure? Please check your reasoning again.",
    "Could the question be read in another way? Would that change the answer?",
    "Can you make up a similar puzzle?",
    "Explain your reasoning in a single short paragraph.",
    "Which step of the reasoning is the easiest to get wrong?",
)
SCENES = ["the library", "the park", "the bakery", "the museum", "the pool", "the station"]


def logic_order(rng: random.Random) -> str:
    """Who is tallest, fastest or oldest."""
    a, b, c, d = (p.name for p in people(rng, count=4))
    more, most, least = rng.choice(
        [
            ("taller", "tallest", "shortest"),
            ("faster", "fastest", "slowest"),
            ("older", "oldest", "youngest"),
            ("heavier", "heaviest", "lightest"),
        ]
    )
    question = rng.choice([f"Who is the {most}?", f"Who is the {least}?", f"Order all four from {most} to {least}."])
    clues = [f"{a} is {more} than {b}.", f"{c} is {more} than {a}.", f"{b} is {more} than {d}."]
    rng.shuffle(clues)
    return " ".join([*clues, question])


def logic_liars(rng: random.Random) -> str:
    """Knights who tell the truth and knaves who lie."""
    a, b = (p.name for p in people(rng, count=2))
    claim = rng.choice(
        [
            f'{a} says: "{b} is a liar." {b} says: "We are both honest."',
            f'{a} says: "At least one of us is a liar." {b} says nothing.',
            f'{a} says: "We are both liars."',
            f'{a} says: "{b} and I are of the same kind." {b} says: "{a} is a liar."',
        ]
    )
    return f"On an island everybody either always lies or always tells the truth. {claim} What are {a} and {b}?"


def logic_places(rng: random.Random) -> str:
    """Match three people with three places."""
    a, b, c = people(rng, count=3)
    x, y, z = rng.sample(SCENES, 3)
    return (
        f"{a.name}, {b.name} and {c.name} went to {x}, {y} and {z}, each to a different place. {a.name} did not go to "
        f"{x}. {b.name} went neither to {x} nor to {y}. Where did each of them go?"
    )


def logic_calendar(rng: random.Random) -> str:
    """Days of the week."""
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    day, after = rng.choice(days), rng.randint(9, 120)
    return rng.choice(
        [
            f"Today is {day}. What day of the week will it be in {after} days?",
            f"If it was {day} {after} days ago, what day is it today? Explain how you found it.",
            f"The day before yesterday was {day}. Which day will it be {after % 7 + 2} days from now?",
        ]
    )


def logic_sequence(rng: random.Random) -> str:
    """The next number in a sequence."""
    start, step, factor = rng.randint(1, 9), rng.randint(2, 9), rng.choice([2, 3])
    terms = rng.choice(
        [
            [start + step * i for i in range(5)],
            [start * factor**i for i in range(5)],
            [start + i * i for i in range(1, 6)],
            [start + i * (i + 1) // 2 * step for i in range(5)],
        ]
    )
    ask = rng.choice(
        ["What is the next number?", "Which number comes next, and what is the rule?", "Find the next two numbers."]
    )
    return f"{', '.join(map(str, terms))}, ... {ask}"


def syllogism(rng: random.Random) -> str:
    """Does the conclusion follow?"""
    a, b, c = rng.choice(
        [
            ("roses", "flowers", "plants"),
            ("squares", "rectangles", "polygons"),
            ("bakers", "early risers", "tea drinkers"),
            ("violins", "string instruments", "instruments"),
            ("poodles", "dogs", "animals"),
            ("novels", "books", "gifts"),
            ("sailors", "swimmers", "singers"),
        ]
    )
    facts = rng.choice(
        [
            f"All {a} are {b}. Some {b} are {c}. Does it follow that some {a} are {c}?",
            f"All {a} are {b}, and all {b} are {c}. Can we conclude that all {a} are {c}?",
            f"No {a} are {c}, and all {b} are {a}. Can any {b} be {c}?",
            f"Some {a} are {b}. All {b} are {c}. Is it certain that some {a} are {c}?",
        ]
    )
    return facts + rng.choice([" Explain why or why not.", " Answer with a short explanation.", ""])


_reason = partial(slots, category="reasoning", followups=FOLLOWUPS)
TEMPLATES = [
    *(
        Template(f"reason_{f.__name__}", "reasoning", f, FOLLOWUPS)
        for f in (logic_order, logic_liars, logic_places, logic_calendar, logic_sequence, syllogism)
    ),
    _reason(
        "reason_riddle",
        texts=["Solve this riddle: {x}", "{x} Explain your answer.", "Here is a riddle for you. {x}"],
        values={
            "x": [
                "I have hands but cannot clap. What am I?",
                "What gets wetter the more it dries?",
                "What has a neck but no head?",
                "I am taken from a mine and shut in a wooden case, and almost everybody uses me. What am I?",
                "What has keys but opens no doors?",
                "What can you catch but never throw?",
                "The more you take, the more you leave behind. What are they?",
                "What goes up but never comes down?",
                "What belongs to you but is used more by other people?",
                "What has many teeth but cannot bite?",
                "What building has the most stories?",
                "What runs but never walks, and has a bed but never sleeps?",
            ]
        },
    ),
    _reason(
        "reason_compare",
        texts=["Which is {x}? Explain your answer.", "Quick question: which is {x}, and why?"],
        values={
            "x": [
                "heavier, a kilogram of feathers or a kilogram of steel",
                "larger, 3/8 or 5/12",
                "cheaper per ounce, 12 ounces for $3 or 20 ounces for $4.50",
                "faster, 90 km per hour or 25 meters per second",
                "more likely, rolling a 6 with one die or getting two heads with two coins",
                "longer, 1,000 minutes or 16 hours",
                "larger, 2 to the power of 10 or 10 to the power of 3",
                "greater, 15% of 80 or 80% of 15",
                "bigger, an area of 5 square meters or a square with sides of 5 meters",
                "older, a house built in 1887 or one that is 130 years old in 2015",
                "warmer, 20 degrees Celsius or 60 degrees Fahrenheit",
            ]
        },
    ),
    _reason(
        "reason_puzzle",
        texts=["{x}", "{x} Think carefully before you answer.", "Puzzle: {x}"],
        values={
            "x": [
                "You have a 3-liter jug and a 5-liter jug. How can you measure exactly 4 liters of water?",
                "A farmer must cross a river with a fox, a hen and a sack of corn, but the boat carries only one of "
                "them besides "
                "him. How does he get everything across safely?",
                "Three switches outside a closed room control three lamps inside. You may enter the room once. How "
                "do you find out "
                "which switch belongs to which lamp?",
                "You have nine coins that look the same, and one of them is lighter. How do you find it with two "
                "weighings on a "
                "balance?",
                "A snail climbs 3 meters up a 10-meter pole each day and slides down 2 meters each night. On which "
                "day does it reach "
                "the top?",
                "A drawer has 10 black socks and 10 blue socks. How many do you need to take out in the dark to be "
                "sure of a pair?",
                "How can you cut a round cake into eight equal pieces with only three straight cuts?",
                "If five painters paint five doors in five hours, how long do 50 painters need for 50 doors?",
                "Two fathers and two sons catch one fish each, but there are only three fish. How is that possible?",
                "You have two ropes that each take exactly one hour to burn, but unevenly. How do you measure 45 "
                "minutes?",
            ]
        },
    ),
    _reason(
        "reason_cause",
        texts=[
            "{x} What could explain this? Give three possible reasons.",
            "{x} What is the most likely explanation?",
            "{x} What would you check first, and why?",
        ],
        values={
            "x": [
                "A man walks into his kitchen, and the floor is wet although it did not rain.",
                "A shop sells more ice cream on days when more people swim in the lake.",
                "My plant gets water every day, but its leaves turn yellow.",
                "The lights in only one room of the house went out.",
                "A student studied twice as long but got a lower grade.",
                "The bus was empty today although it is usually full.",
                "My bread did not rise.",
                "Our website is slow only on Monday mornings.",
                "The dog barks every day at exactly four o'clock.",
                "Sales went up after the company raised its prices.",
            ]
        },
    ),
]
