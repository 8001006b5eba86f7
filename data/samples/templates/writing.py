"""Creative writing: stories, poems, letters, emails, dialogues and role-play."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots

FOLLOWUPS = (
    "Now rewrite it as a poem of four lines.",
    "Now tell it from another point of view.",
    "Give it a surprising ending.",
    "Make it funnier.",
    "Rewrite it so that every sentence is at most ten words long.",
    "Write a fitting title and a one-line summary.",
    "Continue it with a few more lines.",
    "Now make it more formal.",
)
HEROES = [
    "a lighthouse keeper",
    "a shy dragon",
    "a retired astronaut",
    "a clockmaker",
    "a lost robot",
    "a baker who can talk to birds",
    "a young inventor",
    "an old fisherman",
    "a cat that lives in a bookshop",
    "a nervous detective",
    "a violinist who has lost her hearing",
    "a postman in a mountain village",
    "a girl who collects clouds",
    "a ghost who is afraid of people",
]
SITUATIONS = [
    "finds a letter without an address",
    "misses the last train",
    "discovers a door that was not there before",
    "makes a new friend during a storm",
    "has to keep a secret for one day",
    "wins a prize by mistake",
    "goes on a trip without a map",
    "learns to say no",
    "finds something that was lost years ago",
    "has only one hour left",
]
POEM_TOPICS = [
    "the first snow",
    "an empty train station",
    "my grandmother's kitchen",
    "the sea at night",
    "a broken umbrella",
    "spring rain",
    "an old oak tree",
    "learning to swim",
    "the smell of coffee",
    "city lights",
    "a sleeping cat",
    "a long road",
    "homesickness",
    "the moon over a harbor",
    "a forgotten toy",
]
FORMS = [
    "a haiku",
    "a short poem",
    "a limerick",
    "a rhyming poem of eight lines",
    "a poem without rhyme",
    "a song verse and a chorus",
    "a four-line poem",
]
EMAILS = [
    "asking my landlord to repair the heating",
    "thanking a colleague for help with a project",
    "inviting neighbors to a summer party",
    "asking a professor for more time for an essay",
    "canceling a gym membership",
    "applying for a summer job in a bookshop",
    "complaining about a late delivery",
    "asking for feedback after a job interview",
    "telling my team that I will be on vacation next week",
    "recommending a former student for a scholarship",
    "asking a hotel about a lost scarf",
    "declining an invitation to a wedding",
    "welcoming a new member of the team",
    "proposing a short meeting about the budget",
]
LETTERS = [
    "a friend who has just moved to another country",
    "my future self in ten years",
    "a teacher who changed my life",
    "the editor of the local newspaper about noisy streets",
    "a grandmother who is turning ninety",
    "a pen pal in Japan",
    "a younger brother on his first day of school",
    "the mayor about a new playground",
    "a neighbor whose window I broke",
    "an author whose book I loved",
]
ROLES = [
    ("a museum guide", "Show me the most interesting object in your museum."),
    ("a medieval knight", "Tell me about your day."),
    ("a patient cooking teacher", "How do I boil an egg?"),
    ("a ship's captain in a storm", "What are your orders?"),
    ("an interviewer for a job in a toy shop", "Ask me three questions, one after another."),
    ("a talking oak tree that is 500 years old", "What is the strangest thing you have seen?"),
    ("a travel agent", "I want a quiet week by the sea."),
    ("a detective from the 1920s", "Who stole the necklace?"),
    ("a robot who has just learned what humor is", "Tell me your best joke."),
    ("a football coach at half-time", "We are losing 0 to 2. Motivate the team!"),
    ("a gardener", "My tomatoes do not ripen. Help!"),
    ("a wizard's apprentice", "Explain why the kitchen is on fire."),
    ("a wise grandmother", "I had a fight with my best friend."),
    ("a time traveler from the year 2500", "What surprises you most about our time?"),
]
OPENINGS = [
    "The clock struck thirteen.",
    "Nobody had told Mara about the river.",
    "The parcel was still ticking.",
    "On the last day of summer, the circus came to town.",
    "The elevator stopped between the fourth and the fifth floor.",
    "There was one chair too many at the table.",
    "It was the kind of fog that swallows sounds.",
    "The dog came back alone.",
    "Every night at nine, somebody played the piano upstairs.",
    "The map was wrong, and that saved us.",
]
SPEECHES = [
    "a best friend's wedding",
    "the opening of a village library",
    "a retirement party",
    "the end of the school year",
    "a victory of the school chess team",
    "a birthday of a colleague",
    "the start of a charity run",
    "a farewell dinner",
]
PRODUCTS = [
    "a folding bicycle",
    "a reusable water bottle",
    "a board game about bees",
    "a lamp that imitates daylight",
    "a cookbook for students",
    "a warm winter blanket",
    "a language course for travelers",
    "a small herb garden for the kitchen",
    "a noise-canceling headset",
    "a wooden puzzle",
]
SCENES = [
    "a cup and a spoon",
    "the sun and the moon",
    "a customer and a very honest salesman",
    "two strangers stuck in an elevator",
    "a teacher and a student who forgot the homework",
    "a cat and a dog who share a sofa",
    "an astronaut and mission control",
    "a chess player and a talking chessboard",
    "two neighbors who argue about a tree",
    "a child and a snowman",
]
PLACES = [
    "a busy fish market",
    "a quiet mountain lake at dawn",
    "an abandoned factory",
    "a crowded night train",
    "a small bakery on a winter morning",
    "a school on the first day after vacation",
    "a harbor in the rain",
    "an attic full of old things",
    "a desert road",
    "a library at closing time",
]
MOODS = ["cheerful", "mysterious", "sad", "funny", "hopeful", "tense", "gentle"]

_write = partial(slots, category="writing", followups=FOLLOWUPS)
TEMPLATES = [
    _write(
        "write_story",
        texts=[
            "Write a short story in which {who} {what}.",
            "Write a {mood} story of about 150 words. The main character is {who}, who one day {what}.",
            "Tell me a bedtime story in which the hero, {who}, {what}.",
        ],
        values={"who": HEROES, "what": SITUATIONS, "mood": MOODS},
    ),
    _write(
        "write_poem",
        texts=[
            "Write {form} about {x}.",
            "Compose {form} on the topic of {x}.",
            "Please write {form} about {x} with a {mood} tone.",
        ],
        values={"form": FORMS, "x": POEM_TOPICS, "mood": MOODS},
    ),
    _write(
        "write_email",
        texts=[
            "Write an email {x}.",
            "Write a short, polite email {x}.",
            "Draft an email {x}. Keep it under 120 words.",
            "Help me write a friendly email {x}.",
        ],
        values={"x": EMAILS},
    ),
    _write(
        "write_letter",
        texts=["Write a letter to {x}.", "Write a warm and personal letter to {x}.", "Draft a short letter to {x}."],
        values={"x": LETTERS},
    ),
    _write(
        "write_roleplay",
        texts=[
            "Pretend you are {x[0]}. {x[1]}",
            "You are {x[0]}. Stay in character and answer: {x[1]}",
            'I want you to act as {x[0]}. My first message is: "{x[1]}"',
        ],
        values={"x": ROLES},
    ),
    _write(
        "write_opening",
        texts=[
            'Continue this story: "{x}"',
            'Write a short story that begins with the sentence "{x}"',
            'Use "{x}" as the first line of a {mood} story of two paragraphs.',
        ],
        values={"x": OPENINGS, "mood": MOODS},
    ),
    _write(
        "write_speech",
        texts=["Write a short speech for {x}.", "Write a toast of about one minute for {x}. Make it {mood}."],
        values={"x": SPEECHES, "mood": ["funny", "cheerful", "moving", "simple"]},
    ),
    _write(
        "write_advert",
        texts=[
            "Write a product description for {x}.",
            "Write an advertisement for {x} in the style of the 1950s.",
            "Invent a name and a slogan for {x}, and write three sentences to promote it.",
        ],
        values={"x": PRODUCTS},
    ),
    _write(
        "write_dialogue",
        texts=[
            "Write a {mood} dialogue between {x}.",
            "Write a short conversation between {x}, with at least six lines.",
        ],
        values={"x": SCENES, "mood": MOODS},
    ),
    _write(
        "write_scene",
        texts=[
            "Describe {x} in one vivid paragraph. Use all five senses.",
            "Write a {mood} description of {x}.",
            "Describe {x} as a painter would see it.",
        ],
        values={"x": PLACES, "mood": MOODS},
    ),
    _write(
        "write_blog",
        texts=[
            "Write the first paragraph of a travel blog post about {x}.",
            "Write a short, {mood} review of a visit to {x}.",
        ],
        values={
            "x": [
                "a museum of musical clocks",
                "a floating market",
                "a night in a treehouse",
                "a cheese festival",
                "a train ride through the Alps",
                "a cooking class in Naples",
                "a walk along an old city wall",
                "a lake with a secret beach",
            ],
            "mood": MOODS,
        },
    ),
]
