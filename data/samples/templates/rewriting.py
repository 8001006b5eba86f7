"""Rewriting and editing of short texts that were written for this file: tone, length, grammar, style."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots

FOLLOWUPS = (
    "Now make it half as long.",
    "Now rewrite it as a short poem.",
    "Can you make it sound a little warmer?",
    "Give me two more versions.",
    "Explain which changes you made and why.",
    "Now rewrite it for a social media post.",
)
CASUAL = [
    "hey, can't make it to the meeting tmrw, my kid is sick. can we do thursday instead?",
    "your product broke after two days and nobody answers my emails. i want my money back!",
    "Just wanted to ask if you've had a look at my report yet? It's been like two weeks.",
    "Sorry I missed the deadline, I totally forgot about it and then my laptop died.",
    "We need more people for the event on Saturday, so please tell me asap if you can help.",
    "I don't think your plan is going to work. It costs too much and nobody asked for it.",
    "Can you send me the slides from yesterday? I was late and missed half of it.",
    "The new coffee machine is awful and everybody in the office hates it.",
    "I'd love a raise, I've been doing the work of two people since spring.",
    "The wifi in the hotel was terrible and the room smelled weird, but the staff was nice.",
]
WORDY = [
    "Due to the fact that the weather was very bad and it was raining heavily, we made the decision that it would be "
    "better "
    "to postpone the picnic until a later date at some point in the following week.",
    "In my personal opinion, I really think that it is very important that all of the people who work in this office "
    "should "
    "try to make an effort to turn off the lights when they leave at the end of the day.",
    "The purpose of this email is to inform you that the package that you ordered from our store has now been sent "
    "out and "
    "will arrive at your address in approximately three to five days.",
    "There are many different reasons why people choose to travel by train, and one of those reasons is the fact "
    "that trains "
    "are usually more comfortable than buses and also allow you to read a book while traveling.",
    "At this point in time we are not able to offer a refund, but what we can do for you instead is to send you a "
    "new item "
    "completely free of any charge.",
    "The committee held a long discussion about the question of the new parking rules and in the end came to the "
    "conclusion "
    "that the rules should be changed in such a way that visitors can park for two hours.",
    "It was the case that when she first started to learn how to play the piano she found it very difficult, but as "
    "time went "
    "by and she practiced more and more, it gradually became easier for her.",
    "Each and every one of the students is required to hand in the form, which has to be filled in completely, "
    "before the "
    "end of the month of May.",
]
WRONG = [
    "She don't like coffee but her brother like it very much.",
    "Me and him was going to the store when it start to rain.",
    "Their going to bring there dog to the park, to.",
    "I have visit London two times since I was live in England.",
    "The informations in this letter is not correct and need to be change.",
    "He runned so fast that nobody can catched him.",
    "If I would have known it earlier, I would came to help you.",
    "Everyone have to bring they own lunch on friday",
    "The team are playing good but they doesn't score no goals.",
    "I am looking forward to hear from you soon about you're decision",
    "Yesterday I have bought a new phone, it's screen is more bigger then the old one.",
    "Who's book is this, its laying on the table since monday?",
    "The childs was happy because of they got many present.",
    "I could of finished the work yesterday but the computer are too slow.",
]
PASSAGES = [
    "The old lighthouse had not been used for thirty years. Still, every evening, its keeper climbed the stairs and "
    "looked "
    "out over the sea.",
    "Our town needs a new bridge. The present one is narrow, trucks may not use it, and repairs cost more every year.",
    "Honey bees live in large colonies. Most of them are workers that collect nectar, feed the young and guard the "
    "hive.",
    "The experiment failed three times before we noticed that the sensor had been plugged in the wrong way round.",
    "Lena opened the letter, read it twice and laughed. After eleven years, the library wanted its book back.",
    "Regular walking lowers blood pressure, improves sleep and costs nothing. Half an hour a day is enough for most "
    "people.",
    "The market opens at six. By seven the best tomatoes are gone, and by noon only the cheese seller is still there.",
    "Electric buses are quieter than diesel buses and produce no exhaust, but their batteries are heavy and expensive.",
    "A good teacher asks more questions than she answers. Her students leave the room with something to think about.",
    "The storm knocked out the power, so the whole street met outside with candles and shared what was in the "
    "freezers.",
    "Small shops are closing in the city center because rents are high and many people prefer to order online.",
    "The museum's new room shows maps from five centuries. Some have sea monsters on them, and one has an island that "
    "never existed.",
]
MESSAGES = [
    "We are closing the office early on Friday because of the heating repair.",
    "Your application was not successful.",
    "The delivery will be two weeks late.",
    "You forgot to pay last month's invoice.",
    "The concert has been canceled.",
    "Your essay is too long and hard to follow.",
    "We cannot hire you at this time.",
    "Your dog barks all night.",
    "The kitchen must be left clean.",
    "We lost your luggage.",
    "You parked in my space again.",
    "The price will go up by 10 percent.",
]
SENTENCES = [
    "The committee approved the new budget.",
    "A storm destroyed the old bridge.",
    "The chef prepares every dish by hand.",
    "Thousands of fans watched the final match.",
    "The company will build a new factory.",
    "Somebody stole my bicycle last night.",
    "The teacher praised the students for their work.",
    "Our neighbors painted the fence green.",
    "The children have eaten all the cookies.",
    "The gardener waters the roses every morning.",
    "Scientists discovered a new species of frog.",
    "The mayor opened the library in 1998.",
]

_rewrite = partial(slots, category="rewriting", followups=FOLLOWUPS)
TEMPLATES = [
    _rewrite(
        "rewrite_formal",
        texts=[
            'Rewrite this message in a polite and formal tone:\n\n"{x}"',
            "Make this sound more professional: {x}",
            "Please turn this into a polite business email:\n{x}",
        ],
        values={"x": CASUAL},
    ),
    _rewrite(
        "rewrite_shorter",
        texts=[
            "Make this text shorter without losing its meaning:\n\n{x}",
            "Rewrite this in one short, clear sentence: {x}",
            'Edit the following for brevity.\n"{x}"',
        ],
        values={"x": WORDY},
    ),
    _rewrite(
        "rewrite_grammar",
        texts=[
            "Correct the grammar: {x}",
            "Fix all mistakes in this sentence and explain them briefly:\n{x}",
            'Please proofread: "{x}"',
        ],
        values={"x": WRONG},
    ),
    _rewrite(
        "rewrite_simple",
        texts=["Rewrite this text so that a young child can understand it:\n\n{x}", "Say this in simpler words: {x}"],
        values={"x": PASSAGES},
    ),
    _rewrite(
        "rewrite_style",
        texts=[
            "Rewrite the following text in the style of {style}:\n\n{x}",
            "Here is a short text. Rewrite it as if it were {style}.\n\n{x}",
        ],
        values={
            "x": PASSAGES,
            "style": [
                "a news report",
                "a fairy tale",
                "a pirate's diary",
                "a sports commentary",
                "an old letter",
                "a detective story",
                "a weather forecast",
            ],
        },
    ),
    _rewrite(
        "rewrite_kinder",
        texts=[
            'Rewrite this message so that it sounds friendlier: "{x}"',
            'How could I say this more kindly? "{x}"',
            "Soften this message but keep it clear: {x}",
        ],
        values={"x": MESSAGES},
    ),
    _rewrite(
        "rewrite_summary",
        texts=[
            "Summarize this in one sentence:\n\n{x}",
            "Give the main point of the following text in at most ten words.\n\n{x}",
            "Write a title for this text:\n\n{x}",
        ],
        values={"x": PASSAGES},
    ),
    _rewrite(
        "rewrite_expand",
        texts=[
            "Expand this into a full paragraph: {x}",
            "Turn this sentence into a short news item of four or five sentences: {x}",
            "Add vivid details to this sentence: {x}",
        ],
        values={"x": SENTENCES},
    ),
    _rewrite(
        "rewrite_voice",
        texts=[
            "Change this sentence from active to passive voice: {x}",
            "Rewrite this in the passive voice and then in the future tense: {x}",
            "Turn this statement into a question: {x}",
            "Rewrite this sentence in three different ways: {x}",
        ],
        values={"x": SENTENCES},
    ),
    _rewrite(
        "rewrite_point_of_view",
        texts=[
            "Rewrite this text in the first person:\n\n{x}",
            "Rewrite this in the past tense, told by an eyewitness:\n\n{x}",
            "Turn this text into a short dialogue between two friends:\n\n{x}",
        ],
        values={"x": PASSAGES},
    ),
    _rewrite(
        "rewrite_headline",
        texts=[
            "Write a catchy headline for an article that begins like this: {x}",
            "Turn this into a short advertisement: {x}",
            "Write a tweet based on this text:\n{x}",
        ],
        values={"x": PASSAGES},
    ),
]
