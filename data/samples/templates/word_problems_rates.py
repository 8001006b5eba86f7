"""Word problems about time, speed, work, ages, averages and percentages."""

from __future__ import annotations

import random

from data.samples.templates.base import Template, people, person
from data.samples.templates.problem import registrar

TEMPLATES: list[Template] = []
problem = registrar(TEMPLATES)


def clock(minutes: int) -> str:
    """A time of day such as "2:05 p.m."."""
    hour, minute = divmod(minutes % 1440, 60)
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {'a.m.' if hour < 12 else 'p.m.'}"


@problem
def wp_trip_speed(rng: random.Random) -> str:
    who = person(rng)
    first, second = rng.randint(2, 5), rng.randint(1, 4)
    fast, slow = 5 * rng.randint(10, 15), 5 * rng.randint(5, 9)
    return rng.choice(
        [
            f"{who.name} drives for {first} hours at {fast} miles per hour on the highway and then for {second} "
            f"{'hour' if second == 1 else 'hours'} at {slow} miles per hour on country roads. How far does {who.he} "
            f"drive "
            f"in total?",
            f"A delivery van covers {fast * first} km on the highway at {fast} km per hour, then {slow * second} km "
            f"in the "
            f"city at {slow} km per hour. How many hours does the whole trip take?",
        ]
    )


@problem
def wp_two_trains(rng: random.Random) -> str:
    speed_a, speed_b, hours = 10 * rng.randint(4, 9), 10 * rng.randint(4, 9), rng.randint(2, 5)
    kind = rng.choice([("trains", "stations"), ("motorbikes", "villages"), ("buses", "towns")])
    return (
        f"Two {kind[0]} leave two {kind[1]} that are {(speed_a + speed_b) * hours} km apart and travel toward each "
        f"other on parallel routes. One goes {speed_a} km per hour and the other {speed_b} km per hour. If they start "
        f"at {clock(60 * rng.randint(6, 12))}, at what time do they meet?"
    )


@problem
def wp_work_together(rng: random.Random) -> str:
    one, two = people(rng, count=2)
    a, b = rng.choice([(3, 6), (4, 12), (6, 12), (10, 15), (2, 6), (12, 24), (20, 30), (5, 20), (8, 24)])
    unit = "minutes" if a >= 10 else "hours"
    job = rng.choice(["paint the fence", "weed the garden", "clean the workshop", "sort the mail", "pick the cherries"])
    return (
        f"{one.name} can {job} in {a} {unit} alone. {two.name} needs {b} {unit} to do the same job. How long will it "
        f"take them if they work together at their usual speeds?"
    )


@problem
def wp_machine_rate(rng: random.Random) -> str:
    item = rng.choice(["bottles", "toy cars", "light bulbs", "envelopes", "chocolate bars", "bricks"])
    machines, per, minutes = rng.randint(2, 6), 2 * rng.randint(2, 12), rng.choice([2, 3, 4, 5])
    more, hours = rng.randint(2, 5), rng.randint(1, 3)
    total = machines * per * minutes
    return (
        f"In a factory, {machines} identical machines make {total} {item} in {minutes} minutes. The owner buys {more} "
        f"more machines of the same kind. How many {item} can all the machines together make in {60 * hours} minutes?"
    )


@problem
def wp_reading(rng: random.Random) -> str:
    who = person(rng)
    per, days, faster = 5 * rng.randint(3, 8), rng.randint(3, 7), 5 * rng.randint(1, 4)
    left = rng.randint(3, 8)
    pages = per * days + (per + faster) * left
    kind = rng.choice(["mystery novel", "history book", "fantasy novel", "biography", "travel book"])
    return rng.choice(
        [
            f"{who.name} is reading a {kind} with {pages} pages. For the first {days} days {who.he} reads {per} "
            f"pages a "
            f"day. After that {who.he} reads {faster} more pages a day than before. How many days does it take "
            f"{who.him} to finish the book?",
            f"A {kind} has {pages} pages. {who.name} reads {per} pages on each of {days} days. If {who.he} wants to "
            f"finish "
            f"the rest in {left} days, how many pages must {who.he} read per day?",
        ]
    )


@problem
def wp_ages(rng: random.Random) -> str:
    one, two, three = people(rng, count=3)
    young, times, more = rng.randint(4, 12), rng.choice([2, 3, 4]), rng.randint(2, 9)
    word = {2: "twice", 3: "three times", 4: "four times"}[times]
    years = rng.randint(3, 10)
    return rng.choice(
        [
            f"{one.name} is {word} as old as {two.name}. {three.name} is {more} years older than {one.name}. If "
            f"{two.name} "
            f"is {young} years old, what is the sum of all three ages in {years} years?",
            f"In {years} years, {one.name} will be {young * times + years} years old. Right now {one.he} is {word} "
            f"as old "
            f"as {one.his} cousin {two.name}. How old will {two.name} be in {years} years?",
        ]
    )


@problem
def wp_average_score(rng: random.Random) -> str:
    who = person(rng)
    subject = rng.choice(["spelling", "math", "geography", "history", "piano theory"])
    tests = rng.choice([3, 4])
    average = rng.randint(76, 88)
    scores = [average + rng.randint(-8, 8) for _ in range(tests)]
    target = average + rng.randint(0, 2)
    return (
        f"On the first {tests} {subject} tests of the term, {who.name} scored {', '.join(map(str, scores[:-1]))} and "
        f"{scores[-1]}. What score does {who.he} need on the next test for an average of {target} over all {tests + 1} "
        f"tests?"
    )


@problem
def wp_percent_class(rng: random.Random) -> str:
    total = 20 * rng.randint(5, 30)
    bus, walk = rng.choice([25, 30, 35, 40, 45]), rng.choice([10, 15, 20, 25])
    return rng.choice(
        [
            f"A school has {total} students. {bus}% of them come by bus, {walk}% walk and the rest come by car or "
            f"bicycle. "
            f"How many students come by car or bicycle?",
            f"Of the {total} people who answered a survey, {bus}% prefer tea and {walk}% prefer juice. Everybody else "
            f"prefers coffee. How many more people prefer coffee than juice?",
            f"A farm has {total} animals: {bus}% are sheep, {walk}% are goats, and the others are chickens. How many "
            f"chickens are there?",
        ]
    )


@problem
def wp_schedule(rng: random.Random) -> str:
    who = person(rng)
    first, second, walk = 5 * rng.randint(5, 12), 5 * rng.randint(4, 10), rng.randint(6, 19)
    task_a, task_b = rng.sample(
        [
            "doing homework",
            "practicing the violin",
            "cooking dinner",
            "cleaning the kitchen",
            "watering the plants",
            "answering emails",
        ],
        2,
    )
    return (
        f"{who.name}'s train leaves at {clock(60 * rng.randint(9, 19) + 5 * rng.randint(0, 11))} today. Before that "
        f"{who.he} spends {first} minutes {task_a} and {second} minutes {task_b}. The walk to the station takes {walk} "
        f"minutes, and {who.he} wants to be there 10 minutes early. What is the latest time {who.he} can start?"
    )


@problem
def wp_weekly_practice(rng: random.Random) -> str:
    who = person(rng)
    hobby = rng.choice(["practices the cello", "trains for a race", "studies Spanish", "draws", "plays chess"])
    base, step = 5 * rng.randint(3, 9), 5 * rng.randint(1, 3)
    last = rng.choice(["Thursday", "Friday", "Saturday", "Sunday"])
    return (
        f"On Monday {who.name} {hobby} for {base} minutes. Every day after that {who.he} does {step} minutes more than "
        f"the day before. How many minutes does {who.he} spend on it from Monday through {last}?"
    )


@problem
def wp_tank(rng: random.Random) -> str:
    fill, leak, minutes = rng.randint(12, 30), rng.randint(2, 9), 5 * rng.randint(4, 18)
    start = 10 * rng.randint(0, 9)
    what = rng.choice(["water tank", "garden pond", "swimming pool", "fish tank"])
    state = f"already holds {start} liters" if start else "is empty at first"
    return (
        f"A pump fills a {what} at {fill} liters per minute, but a leak lets out {leak} liters per minute. The {what} "
        f"{state}. After how many minutes will it hold {start + (fill - leak) * minutes} liters?"
    )


@problem
def wp_runner_laps(rng: random.Random) -> str:
    one, two = people(rng, count=2)
    lap, laps = rng.choice([200, 250, 400, 500]), 2 * rng.randint(3, 8)
    time_a, time_b = rng.randint(2, 3), rng.randint(4, 5)
    return (
        f"{one.name} and {two.name} run laps on a {lap}-meter track. {one.name} needs {time_a} minutes for a lap and "
        f"{two.name} needs {time_b} minutes. They start together. When {one.name} has finished {laps} laps, how many "
        f"meters has {two.name} run?"
    )


@problem
def wp_population(rng: random.Random) -> str:
    start, factor, rounds = rng.choice([5, 8, 10, 12, 20, 25, 50]), rng.choice([2, 3]), rng.randint(3, 5)
    word = {2: "doubles", 3: "triples"}[factor]
    thing, unit = rng.choice(
        [
            ("number of bacteria in a dish", "hour"),
            ("number of visitors to a new website", "month"),
            ("number of water lilies on a pond", "week"),
            ("number of rabbits on an island", "year"),
        ]
    )
    removed = rng.randint(2, 4 * start)
    return (
        f"The {thing} {word} every {unit}. At the beginning there are {start}. After {rounds} {unit}s, {removed} of "
        f"them disappear. How many are left at that moment?"
    )


@problem
def wp_battery(rng: random.Random) -> str:
    who = person(rng)
    start, drain_a, drain_b = 5 * rng.randint(14, 20), rng.choice([6, 8, 10]), rng.choice([12, 14, 15])
    hours = rng.randint(2, 4)
    return (
        f"{who.name}'s phone battery is at {start}%. It loses {drain_a}% per hour while playing music and {drain_b}% "
        f"per "
        f"hour while showing videos. {who.name} listens to music for {hours} hours and then watches videos for "
        f"{rng.choice(['1 hour', '2 hours', 'half an hour'])}. What percentage of the battery is left?"
    )


@problem
def wp_commute_year(rng: random.Random) -> str:
    who = person(rng)
    oneway, days, weeks = rng.randint(3, 18), rng.randint(3, 5), rng.choice([40, 44, 46, 48])
    per = rng.choice([5, 8, 10])
    return rng.choice(
        [
            f"{who.name} lives {oneway} km from work and cycles there and back {days} days a week. How many "
            f"kilometers does "
            f"{who.he} cycle in {weeks} weeks?",
            f"{who.name}'s car needs {per} liters of fuel for 100 km. {who.He} drives {10 * oneway} km to work and "
            f"the same "
            f"distance back, {days} days a week. How many liters of fuel does {who.he} need in {weeks // 4} weeks?",
        ]
    )


@problem
def wp_download(rng: random.Random) -> str:
    who = person(rng)
    speed, minutes = rng.choice([10, 20, 25, 40, 50]), rng.randint(4, 15)
    part = rng.choice([20, 25, 40, 50, 60, 75])
    size = speed * minutes * 60 // 100 * 100
    return (
        f"{who.name} downloads a game of {size:,} MB at {speed} MB per second. After {part}% of the download the "
        f"connection slows to half that speed. How many seconds does the whole download take?"
    )
