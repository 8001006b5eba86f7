"""Requests to weigh, imagine or check something: thought experiments, pros and cons, myths."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots
from data.samples.templates.explanations import FOLLOWUPS

WHAT_IF = [
    "the Moon disappeared",
    "bees died out",
    "the Earth stopped rotating",
    "everyone worked four days a week",
    "electricity had never been discovered",
    "all cars were electric",
    "people lived for 200 years",
    "there were no friction",
    "the ice caps melted",
    "cash were abolished",
    "the dinosaurs had survived",
    "everyone spoke the same language",
]

_explain = partial(slots, category="explanation", followups=FOLLOWUPS)
TEMPLATES = [
    _explain(
        "explain_what_if",
        texts=[
            "What would happen if {x}?",
            "Imagine that {x}. What would change in daily life?",
            "If {x}, which three consequences would be the most important?",
        ],
        values={"x": WHAT_IF},
    ),
    _explain(
        "explain_pros_cons",
        texts=[
            "What are the advantages and disadvantages of {x}?",
            "Discuss the pros and cons of {x} in a balanced way.",
            "Is {x} a good idea? Give arguments for both sides.",
        ],
        values={
            "x": [
                "nuclear power",
                "remote work",
                "school uniforms",
                "homework",
                "electric cars",
                "online learning",
                "a universal basic income",
                "genetically modified crops",
                "social media for teenagers",
                "living in a big city",
                "self-driving cars",
                "daylight saving time",
                "zoos",
                "tourism in small towns",
                "open-plan offices",
            ]
        },
    ),
    _explain(
        "explain_myth",
        texts=[
            "Is it true that {x}?",
            "Many people believe that {x}. Is that correct?",
            "Fact or myth: {x}? Please explain.",
        ],
        values={
            "x": [
                "we use only ten percent of our brains",
                "lightning never strikes the same place twice",
                "goldfish have a memory of three seconds",
                "bulls are angered by the color red",
                "sugar makes children hyperactive",
                "the Great Wall of China is visible from the Moon",
                "carrots improve your eyesight",
                "you lose most of your heat through your head",
                "bats are blind",
                "coffee stunts your growth",
                "reading in dim light damages your eyes",
                "chewing gum stays in the stomach for years",
            ]
        },
    ),
]
