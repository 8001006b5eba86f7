"""Lists, plans, schedules, checklists and step-by-step instructions."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots

FOLLOWUPS = (
    "Which of these would you pick first, and why?",
    "Now sort them by cost, cheapest first.",
    "Can you put this in a table?",
    "What would change if I had only half the time?",
    "Shorten the list to the three most important points.",
    "Adapt it for a family with two small children.",
    "Now turn it into a checklist.",
)
NUMBERS = ["three", "five", "six", "seven", "ten"]
IDEAS = [
    "ways to save water at home",
    "healthy snacks for a long car trip",
    "indoor games for a rainy day",
    "ways to remember new words",
    "names for a small coffee shop",
    "gifts for a friend who loves plants",
    "topics for a school presentation",
    "tips for better sleep",
    "uses for old glass jars",
    "things to do on a quiet Sunday",
    "books for readers who like the sea",
    "questions to ask at a job interview",
    "cheap dinners with rice",
    "ways to make new friends in a new city",
    "habits of good listeners",
    "uses of a paper clip",
    "names for a friendly robot",
    "inventions that changed daily life",
    "ways to reduce plastic waste",
    "warm-up exercises before a run",
]
TRIPS = [
    "Rome",
    "Kyoto",
    "Lisbon",
    "Edinburgh",
    "Vancouver",
    "Istanbul",
    "Copenhagen",
    "Mexico City",
    "Vienna",
    "Marrakesh",
    "New Orleans",
    "Prague",
]
STYLES = [
    "on a small budget",
    "with two children",
    "for people who love food",
    "with as little walking as possible",
    "for lovers of art",
    "in rainy weather",
]
TASKS = [
    "repot a plant",
    "change a bicycle tire",
    "make pancakes",
    "set up a tent",
    "clean a keyboard",
    "write a thank-you note",
    "brew a good cup of tea",
    "tie a tie",
    "back up a phone",
    "iron a shirt",
    "plant a tree",
    "make a paper airplane",
    "remove a coffee stain",
    "sharpen a kitchen knife",
    "bake simple bread",
    "prepare a short speech",
]
EVENTS = [
    "a birthday party for a seven-year-old",
    "a picnic for ten people",
    "a move to a new apartment",
    "a school bake sale",
    "a weekend camping trip",
    "a neighborhood cleanup",
    "a surprise party for a colleague",
    "a small wedding in a garden",
    "a book club meeting",
    "a charity run",
    "a game night with eight guests",
    "a visit from my parents",
]
GOALS = [
    "run five kilometers",
    "learn basic Spanish",
    "read one book a month",
    "save 1,000 dollars",
    "learn to type fast",
    "play a song on the guitar",
    "write a short story",
    "eat more vegetables",
    "learn the basics of Python",
    "prepare for a biology exam",
    "do ten push-ups",
    "grow tomatoes on a balcony",
    "get up at six every day",
]
MEALS = [
    "a vegetarian",
    "a student with a tiny kitchen",
    "a family of four",
    "someone who cannot eat dairy",
    "a marathon runner",
    "a person who has only 20 minutes to cook",
    "someone who loves spicy food",
    "two retired people",
]
PACK = [
    "a week at the beach",
    "a winter hike",
    "three days at a music festival",
    "a business trip to London",
    "a bicycle tour",
    "a night in a hospital",
    "a flight with a baby",
    "a weekend on a sailing boat",
    "a school trip to the mountains",
    "a month in a tropical country",
]
DECISIONS = [
    "buying a used car",
    "adopting a dog",
    "renting an apartment",
    "choosing a university",
    "quitting a job",
    "signing up for a gym",
    "buying a house",
    "lending money to a friend",
    "moving to another country",
    "starting a small business",
]
AGENDAS = [
    "a one-hour team meeting about a new website",
    "a two-hour workshop on time management",
    "a parent evening at a school",
    "the first meeting of a photo club",
    "a yearly review with an employee",
    "a half-day course in first aid",
    "the first lesson of a beginner's drawing class",
    "an afternoon of board games at a library",
]

_list = partial(slots, category="lists-planning", followups=FOLLOWUPS)
TEMPLATES = [
    _list(
        "list_ideas",
        texts=[
            "List {n} {x}.",
            "Give me {n} {x}.",
            "Can you suggest {n} {x}?",
            "Name {n} {x} and explain each in one sentence.",
        ],
        values={"n": NUMBERS, "x": IDEAS},
    ),
    _list(
        "plan_trip",
        texts=[
            "Plan a {n}-day trip to {x} {style}.",
            "I have {n} days in {x}. What should I see? Please plan it {style}.",
            "Make an itinerary for {n} days in {x} {style}.",
        ],
        values={"n": ["two", "three", "four"], "x": TRIPS, "style": STYLES},
    ),
    _list(
        "steps_howto",
        texts=[
            "How do I {x}? Give me numbered steps.",
            "Write simple step-by-step instructions to {x}.",
            "List what I need and the steps to {x}.",
        ],
        values={"x": TASKS},
    ),
    _list(
        "plan_event",
        texts=[
            "Help me plan {x}.",
            "Make a checklist for {x}.",
            "What do I have to think of when I organize {x}? Give me a list in order of time.",
            "Create a simple budget for {x}.",
        ],
        values={"x": EVENTS},
    ),
    _list(
        "plan_goal",
        texts=[
            "Make a plan for {n} weeks that helps me {x}.",
            "I want to {x}. Give me a realistic plan for the next {n} weeks.",
            "Create a weekly schedule that helps me {x} within {n} weeks.",
        ],
        values={"n": ["four", "six", "eight"], "x": GOALS},
    ),
    _list(
        "plan_meals",
        texts=[
            "Suggest a dinner menu for {n} days for {x}.",
            "Make a shopping list for {n} days of simple meals for {x}.",
            "Plan breakfast, lunch and dinner for {n} days for {x}.",
        ],
        values={"n": ["two", "three", "five"], "x": MEALS},
    ),
    _list(
        "list_packing",
        texts=[
            "What should I pack for {x}?",
            "Write a packing list for {x}, sorted by category.",
            "Give me the ten most important things to bring for {x}.",
        ],
        values={"x": PACK},
    ),
    _list(
        "list_questions",
        texts=[
            "What questions should I ask myself before {x}?",
            "List the main risks of {x} and how to reduce them.",
            "Give me a short checklist for {x}.",
        ],
        values={"x": DECISIONS},
    ),
    _list(
        "plan_agenda",
        texts=["Write an agenda for {x}.", "Draft a schedule with times for {x}.", "Outline {x} in bullet points."],
        values={"x": AGENDAS},
    ),
    _list(
        "list_outline",
        texts=[
            "Write an outline for an essay about {x}.",
            "List {n} arguments that could appear in an essay about {x}.",
            "Suggest {n} section headings for an article about {x}.",
        ],
        values={
            "n": ["four", "five", "six"],
            "x": [
                "the future of cities",
                "why reading matters",
                "life without a smartphone",
                "the value of boredom",
                "animals that work with people",
                "clean energy",
                "the role of sports in school",
                "how music connects people",
                "space travel",
                "fast fashion",
            ],
        },
    ),
    _list(
        "list_routine",
        texts=[
            "Suggest a morning routine for {x}.",
            "Write a daily schedule for {x}.",
            "What would an ideal evening look like for {x}? Answer with a timetable.",
        ],
        values={
            "x": [
                "a nurse who works night shifts",
                "a student before exams",
                "a writer who works at home",
                "a parent of a newborn",
                "someone who trains for a marathon",
                "a retired teacher",
                "a musician on tour",
                "a shop owner",
            ]
        },
    ),
]
