"""Everyday questions: advice, household, health, work, technology, manners, language and small facts."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots

FOLLOWUPS = (
    "What if that does not work?",
    "Can you say that in two sentences?",
    "Which of these is the easiest to start with?",
    "How long will that take?",
    "What mistakes should I avoid?",
    "Is there a cheaper way?",
)
PROBLEMS = [
    "I can't fall asleep before two in the morning",
    "I keep forgetting people's names",
    "my roommate never washes the dishes",
    "I get nervous when I speak in front of a group",
    "I spend too much time on my phone",
    "my new neighbor plays loud music at night",
    "I find it hard to say no at work",
    "I start many hobbies but finish nothing",
    "my best friend moved away",
    "I always run late in the morning",
    "my teenage son doesn't talk to me anymore",
    "I feel tired after lunch every day",
    "my coworker takes credit for my ideas",
    "I can't decide what to study",
    "I lose my keys all the time",
    "I want to exercise but have no time",
]
HOUSE = [
    "get rid of fruit flies",
    "remove red wine from a carpet",
    "keep bread fresh for longer",
    "clean a burnt pan",
    "unclog a sink",
    "stop a door from squeaking",
    "store potatoes",
    "remove a sticker from glass",
    "keep cut flowers fresh",
    "get the smell of garlic off my hands",
    "wash a wool sweater",
    "make a small room look bigger",
    "ripen avocados quickly",
    "clean white sneakers",
    "descale a kettle",
    "keep cats off the kitchen table",
]
HEALTH = [
    "How much water should an adult drink a day?",
    "Is it bad to skip breakfast?",
    "How can I relieve a stiff neck from desk work?",
    "What helps against hiccups?",
    "How many hours of sleep does a teenager need?",
    "Is walking as healthy as running?",
    "What should I eat before a long run?",
    "How do I treat a mild sunburn?",
    "Why do my eyes hurt after a day at the computer?",
    "How can I eat less sugar?",
    "What are good sources of protein besides meat?",
    "How often should I replace my toothbrush?",
    "Is coffee in the afternoon a bad idea?",
    "How can I calm down quickly before an exam?",
]
TECH = [
    "my laptop gets very hot",
    "my phone battery is empty by noon",
    "the Wi-Fi is slow in the bedroom",
    "my printer prints blank pages",
    "I can't hear anything in video calls",
    "my computer takes ten minutes to start",
    "my phone says the storage is full",
    "a website keeps asking me to log in",
    "I deleted a file by accident",
    "my keyboard types the wrong letters",
    "I got an email that says my account was hacked",
    "my headphones do not connect to my phone",
]
MANNERS = [
    "split the bill on a first date",
    "tell a friend that I don't like the gift",
    "ask a guest to take off the shoes",
    "decline a second helping at dinner",
    "end a phone call that takes too long",
    "ask my boss for a day off",
    "apologize after a quarrel",
    "thank a neighbor who watered my plants",
    "ask for my money back from a friend",
    "introduce two people who don't know each other",
    "leave a party early",
    "congratulate someone on a new job",
]
CHOICES = [
    "a laptop or a tablet for university",
    "an electric or a gas stove",
    "a cat or a dog for a small apartment",
    "a train or a plane for a trip of 600 kilometers",
    "paper books or an e-reader",
    "a bike or a bus for a commute of 8 kilometers",
    "oil or acrylic paint for a beginner",
    "to rent or to buy a home",
    "a piano or a guitar as a first instrument",
    "glasses or contact lenses",
    "to study in the morning or at night",
    "a tent or a cabin for a family vacation",
]
WORDS = [
    "break the ice",
    "a blessing in disguise",
    "once in a blue moon",
    "spill the beans",
    "the last straw",
    "hit the nail on the head",
    "under the weather",
    "a piece of cake",
    "bite the bullet",
    "cut corners",
    "call it a day",
    "on thin ice",
    "the elephant in the room",
]
FACTS = [
    "How many time zones are there?",
    "Which planet is the largest in the solar system?",
    "What is the capital of Australia?",
    "How long does light take to reach us from the Sun?",
    "Which is the longest river in Africa?",
    "What is the boiling point of water at sea level?",
    "Who painted the Mona Lisa?",
    "How many bones does an adult have?",
    "Which language has the most native speakers?",
    "What do pandas eat?",
    "In which year did people first land on the Moon?",
    "What is the smallest country in the world?",
    "Which gas do plants take in?",
    "What is the tallest mountain on Earth?",
    "How many players are on a volleyball team?",
    "What is the currency of Switzerland?",
]
COOKING = [
    "eggs, spinach and old bread",
    "a can of chickpeas and two carrots",
    "rice, one onion and some cheese",
    "potatoes, leeks and cream",
    "two ripe bananas and oats",
    "pasta, garlic and a lemon",
    "lentils and tomatoes",
    "tofu, noodles and peanut butter",
    "apples, flour and butter",
    "a cucumber, yogurt and mint",
    "mushrooms and a sheet of puff pastry",
    "beans, corn and tortillas",
]
OPINIONS = [
    "a healthy way to deal with stress at work",
    "a good age to get a first phone",
    "the best way to learn a language as an adult",
    "a fair way to share housework",
    "the right time to change jobs",
    "a sensible amount of pocket money for a child of ten",
    "a good way to keep in touch with old friends",
    "the best season to visit northern Europe",
    "a good first pet for a child",
]

_ask = partial(slots, category="everyday", followups=FOLLOWUPS)
TEMPLATES = [
    _ask(
        "ask_advice",
        texts=[
            "Lately, {x}. What can I do?",
            "{x}. Do you have any advice?",
            "I need some advice: {x}.",
            "Here is my problem: {x}. What would you do in my place?",
        ],
        values={"x": PROBLEMS},
    ),
    _ask(
        "ask_household",
        texts=["How can I {x}?", "What is the best way to {x}?", "Is there a simple trick to {x}?"],
        values={"x": HOUSE},
    ),
    _ask(
        "ask_health",
        texts=["{x}", "{x} Please answer briefly.", "{x} I would like a short answer with the reason."],
        values={"x": HEALTH},
    ),
    _ask(
        "ask_tech",
        texts=[
            "Help, {x}! What should I try first?",
            "What could be the reason if {x}?",
            "I have a problem: {x}. How can I fix it?",
        ],
        values={"x": TECH},
    ),
    _ask(
        "ask_manners",
        texts=[
            "How do I {x} politely?",
            "What is a good way to {x}?",
            "Give me two sentences that I could use to {x}.",
        ],
        values={"x": MANNERS},
    ),
    _ask(
        "ask_choice",
        texts=[
            "What is better, {x}?",
            "Help me decide: {x}?",
            "What would you recommend, {x}? Please compare the two options.",
        ],
        values={"x": CHOICES},
    ),
    _ask(
        "ask_idiom",
        texts=[
            'What does the expression "{x}" mean?',
            'Where does the phrase "{x}" come from, and how is it used?',
            'Use the expression "{x}" in three different sentences.',
        ],
        values={"x": WORDS},
    ),
    _ask("ask_fact", texts=["{x}", "{x} Add one interesting detail.", "Quick question: {x}"], values={"x": FACTS}),
    _ask(
        "ask_cooking",
        texts=[
            "What can I cook with {x}?",
            "Give me a simple recipe that uses {x}.",
            "I only have {x} at home. Any ideas for dinner?",
        ],
        values={"x": COOKING},
    ),
    _ask(
        "ask_opinion",
        texts=[
            "What is {x}?",
            "In your view, what is {x}? Give reasons.",
            "People disagree about {x}. What do you think?",
        ],
        values={"x": OPINIONS},
    ),
    _ask(
        "ask_word",
        texts=[
            'What is another word for "{x}"?',
            'How do I use the word "{x}" in a sentence?',
            'What does "{x}" mean, and what is its opposite?',
        ],
        values={
            "x": [
                "stubborn",
                "brief",
                "generous",
                "reluctant",
                "ancient",
                "fragile",
                "vivid",
                "scarce",
                "diligent",
                "humble",
            ]
        },
    ),
]
