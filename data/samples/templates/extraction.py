"""Extraction, classification and formatting: names, sentiment, JSON, tables and lists from short made-up texts."""

from __future__ import annotations

import random

from data.samples.templates.base import Template, people

FOLLOWUPS = (
    "Now give the same result in a different format.",
    "Explain in one sentence how you decided.",
    "Sort the result alphabetically.",
    "How certain are you about each item?",
    "Add one more made-up entry in the same format.",
)
CITIES = ["Oslo", "Lyon", "Porto", "Boston", "Nairobi", "Osaka", "Turin", "Dublin"]
JOBS = ["nurse", "carpenter", "teacher", "baker", "pilot", "gardener", "lawyer", "florist"]
REVIEWS = [
    "The soup was cold and we waited an hour.",
    "Best haircut I have had in years!",
    "The book is fine, but the ending felt rushed.",
    "It does what it says, nothing more.",
    "I will never stay in this hotel again.",
    "Lovely staff, tasty cake, fair prices.",
    "The shoes look great but hurt after ten minutes.",
    "Arrived a day early and works perfectly.",
    "I fell asleep during the film.",
    "The app crashes whenever I open the camera.",
    "My kids play with it every day.",
    "Average food, wonderful view.",
]
ITEMS = [
    "whale",
    "copper",
    "trumpet",
    "salmon",
    "oak",
    "silver",
    "flute",
    "eagle",
    "tulip",
    "iron",
    "cello",
    "sparrow",
    "maple",
    "trout",
    "daisy",
]


def extract_people_json(rng: random.Random) -> str:
    """Names, ages, cities and jobs from running text."""
    rows = [
        f"{p.name} is {rng.randint(19, 68)} and works as a {rng.choice(JOBS)} in {rng.choice(CITIES)}."
        for p in people(rng, count=rng.randint(2, 4))
    ]
    lead = rng.choice(
        [
            "Extract name, age, job and city from this text as JSON:",
            "Turn the following sentences into a JSON list with the keys name, age, job and city.",
            "Read the text and return one JSON object per person:",
        ]
    )
    return f"{lead}\n\n{' '.join(rows)}"


def classify_reviews(rng: random.Random) -> str:
    """Sentiment of several reviews."""
    lines = "\n".join(f"{i}. {text}" for i, text in enumerate(rng.sample(REVIEWS, rng.randint(3, 5)), 1))
    lead = rng.choice(
        [
            "Classify each review as positive, negative or mixed.",
            "Rate the mood of every review from 1 (very bad) to 5 (very good). Return only a list of numbers.",
            "Which of these reviews are negative? Give their numbers.",
        ]
    )
    return f"{lead}\n\n{lines}"


def table_from_prices(rng: random.Random) -> str:
    """A table of items and prices."""
    goods = rng.sample(["tea", "honey", "soap", "candles", "rice", "jam", "pasta", "olive oil"], rng.randint(3, 5))
    text = ", ".join(f"{item} for ${rng.randint(2, 15)}.{rng.choice(['00', '50', '25', '99'])}" for item in goods)
    lead = rng.choice(
        [
            "Put these prices in a Markdown table, most expensive first:",
            "Make a table with the columns Item and Price from this list:",
            "Convert this to CSV with a header line:",
        ]
    )
    return f"{lead} {text}"


def sort_into_groups(rng: random.Random) -> str:
    """Group words by what they name."""
    lead = rng.choice(
        [
            "Sort these words into groups and name each group:",
            "Group the following words by category and return JSON:",
            "Which of these words belong together? Answer with one line per group.",
        ]
    )
    return f"{lead} {', '.join(rng.sample(ITEMS, rng.randint(7, 11)))}"


def extract_event(rng: random.Random) -> str:
    """Date, time, place and topic of an event."""
    who = people(rng, count=1)[0]
    month, day = rng.choice(["March", "May", "June", "October"]), rng.randint(2, 28)
    topic = rng.choice(["the spring fair", "the new heating system", "our trip to the coast", "the choir concert"])
    text = (
        f"Hi all, {who.name} here. We will meet on {month} {day} at "
        f"{rng.randint(2, 8)}:{rng.choice(['00', '15', '30'])} p.m. in "
        f"{rng.choice(['the town hall', 'room 12', 'the school gym', 'the old barn'])} to talk about {topic}. Please "
        f"bring "
        f"{rng.choice(['a pen', 'some cake', 'your ideas', 'a chair'])}."
    )
    lead = rng.choice(
        [
            "Extract the date, time, place and topic from this message:",
            "Fill in a form with the fields Date, Time, Place, Topic and Bring from this text:",
            "Return the facts of this message as YAML:",
        ]
    )
    return f"{lead}\n\n{text}"


def find_words(rng: random.Random) -> str:
    """Parts of speech or facts in a sentence."""
    one, two = people(rng, count=2)
    text = (
        f"On a {rng.choice(['cold', 'windy', 'bright', 'quiet'])} morning, {one.name} and {two.name} drove from "
        f"{rng.choice(CITIES)} to "
        f"the {rng.choice(['coast', 'lake', 'mountains', 'border'])} and bought {rng.randint(3, 9)} "
        f"{rng.choice(['baskets', 'jars', 'maps'])}."
    )
    lead = rng.choice(
        [
            "List all nouns in this sentence:",
            "Underline the verbs by putting them between asterisks:",
            "Who, where, when, what? Answer in four short lines for this sentence:",
            "Find all names of people and places:",
        ]
    )
    return f"{lead} {text}"


def top_of_table(rng: random.Random) -> str:
    """A question about rows of data."""
    rows = [
        f"- {p.name}: {rng.randint(12, 60)} sales, {rng.randint(2, 9)} returns"
        for p in people(rng, count=rng.randint(4, 5))
    ]
    ask = rng.choice(
        [
            "Who has the most sales after returns?",
            "Rank everyone by the share of returns.",
            "Return this as JSON and add the number of sales minus returns for each person.",
        ]
    )
    return "Here are last month's numbers:\n" + "\n".join(rows) + f"\n{ask}"


TEMPLATES = [
    Template(f.__name__, "extraction", f, FOLLOWUPS)
    for f in (
        extract_people_json,
        classify_reviews,
        table_from_prices,
        sort_into_groups,
        extract_event,
        find_words,
        top_of_table,
    )
]
