"""Word problems about quantities: sharing, packing, recipes, fractions, geometry and counting."""

from __future__ import annotations

import random

from data.samples.templates.base import Template, people, person
from data.samples.templates.problem import registrar

TEMPLATES: list[Template] = []
problem = registrar(TEMPLATES)


@problem
def wp_sharing(rng: random.Random) -> str:
    who = person(rng)
    thing = rng.choice(["stickers", "marbles", "trading cards", "seashells", "beads", "postcards"])
    start, gift, lost, friends = rng.randint(30, 90), rng.randint(10, 40), rng.randint(3, 15), rng.randint(3, 6)
    start += -(start + gift - lost) % friends
    return (
        f"{who.name} has {start} {thing}. {who.His} aunt gives "
        f"{who.him} {gift} more, but {who.he} loses {lost} on the way home. {who.He} shares the rest equally among "
        f"{friends} friends. How many {thing} does each friend get?"
    )


@problem
def wp_packing(rng: random.Random) -> str:
    who = person(rng)
    thing, box = rng.choice(
        [
            ("eggs", "carton"),
            ("cupcakes", "box"),
            ("oranges", "crate"),
            ("jars of jam", "case"),
            ("books", "shelf"),
            ("candles", "box"),
            ("tulip bulbs", "tray"),
        ]
    )
    plural = {"box": "boxes", "shelf": "shelves"}.get(box, box + "s")
    per, total, broken = rng.choice([6, 8, 10, 12, 15, 24]), rng.randint(120, 400), rng.randint(4, 25)
    return rng.choice(
        [
            f"{who.name} has {total} {thing} to pack. {broken} of them are damaged and have to be thrown away. Each "
            f"{box} "
            f"holds {per}. How many {plural} does {who.he} need so that all the good ones are packed?",
            f"Each {box} holds {per} {thing}. {who.name} has already filled {rng.randint(3, 9)} {plural} and still has "
            f"{total} {thing} left. How many {plural} will there be in total when everything is packed?",
        ]
    )


@problem
def wp_recipe(rng: random.Random) -> str:
    who = person(rng)
    dish, unit = rng.choice(
        [
            ("pancakes", "pancakes"),
            ("oat cookies", "cookies"),
            ("dinner rolls", "rolls"),
            ("muffins", "muffins"),
            ("dumplings", "dumplings"),
        ]
    )
    makes, flour, eggs, factor = rng.choice([8, 10, 12, 16]), rng.randint(2, 4), rng.randint(2, 3), rng.randint(3, 6)
    return rng.choice(
        [
            f"A recipe for {makes} {dish} needs {flour} cups of flour and {eggs} eggs. {who.name} wants to make "
            f"{makes * factor} {unit} but has only {rng.randint(2, 5)} eggs at home. How many more eggs does {who.he} "
            f"need to buy?",
            f"To make {makes} {dish}, {who.name} uses {flour * 100} grams of flour. How many kilograms of flour does "
            f"{who.he} need for {makes * factor} {unit}?",
        ]
    )


@problem
def wp_fraction_cake(rng: random.Random) -> str:
    one, two, three = people(rng, count=3)
    food, part = rng.choice([("pizza", "slices"), ("tray of brownies", "pieces"), ("cake", "slices")])
    base = rng.choice([12, 24, 36, 48])
    rest = rng.randint(1, 4)
    return (
        f"A {food} is cut into {base} {part}. {one.name} eats one third of the {part}, and {two.name} eats half of "
        f"what "
        f"is left. Then {three.name} eats {rest} {'of them' if rest > 1 else 'of the ' + part}. How many {part} remain?"
    )


@problem
def wp_garden_area(rng: random.Random) -> str:
    who = person(rng)
    length, width = rng.randint(8, 25), rng.randint(4, 12)
    gap, price = rng.randint(2, 4), rng.randint(4, 12)
    return rng.choice(
        [
            f"{who.name} has a rectangular garden that is {length} meters long and {width} meters wide. {who.He} "
            f"wants to "
            f"put a fence around it but leave a {gap}-meter gap for the gate. The fence costs ${price} per meter. "
            f"What does "
            f"the fence cost?",
            f"A rectangular vegetable bed is {length} feet long and {width} feet wide. {who.name} uses a square of "
            f"side "
            f"{gap} feet in it for herbs and fills the rest with tomatoes. How many square feet are left for tomatoes?",
            f"The floor of a hall measures {length} meters by {width} meters. Tiles are sold in boxes that each cover "
            f"{gap} square meters and cost ${price}. How much will {who.name} spend on tiles for the whole floor?",
        ]
    )


@problem
def wp_bus_passengers(rng: random.Random) -> str:
    vehicle, stop = rng.choice([("bus", "stop"), ("tram", "stop"), ("ferry", "harbor"), ("train", "station")])
    start, on1, off1, on2 = rng.randint(12, 40), rng.randint(3, 15), rng.randint(2, 11), rng.randint(2, 9)
    off2 = (start + on1 - off1) // 2
    half = "half of the passengers leave" if (start + on1 - off1) % 2 == 0 else f"{off2} passengers leave"
    return (
        f"A {vehicle} starts with {start} passengers. At the first {stop}, {on1} people get on and {off1} get off. At "
        f"the second {stop}, {half} and {on2} people get on. How many passengers are on the {vehicle} now?"
    )


@problem
def wp_legs(rng: random.Random) -> str:
    first, second = rng.choice([("chickens", "cows"), ("ducks", "sheep"), ("geese", "goats"), ("ostriches", "horses")])
    a, b = rng.randint(6, 30), rng.randint(4, 25)
    return rng.choice(
        [
            f"A farmer counts {a + b} heads and {2 * a + 4 * b} legs among the {first} and {second} in the yard. How "
            f"many "
            f"{second} are there?",
            f"There are {a + b} animals on a farm, all of them {first} or {second}. Together they have {2 * a + 4 * b} "
            f"legs. How many {first} does the farmer have?",
        ]
    )


@problem
def wp_harvest(rng: random.Random) -> str:
    one, two = people(rng, count=2)
    fruit = rng.choice(["apples", "pears", "plums", "peaches", "strawberries", "tomatoes"])
    baskets, per, more = rng.randint(4, 12), rng.randint(15, 40), rng.randint(5, 20)
    sold = rng.choice(["half", "a quarter", "one fifth"])
    return (
        f"{one.name} fills {baskets} baskets with {per} {fruit} each. {two.name} fills the same number of baskets but "
        f"puts {more} more {fruit} in each one. They use {20 * rng.randint(2, 6)} {fruit} for jam and give {sold} of "
        f"their first total to neighbors. How many {fruit} do they have left?"
    )


@problem
def wp_seats(rng: random.Random) -> str:
    place = rng.choice(["theater", "cinema", "lecture hall", "circus tent", "concert hall"])
    rows, seats, empty = rng.randint(12, 30), rng.randint(14, 28), rng.randint(15, 90)
    return rng.choice(
        [
            f"A {place} has {rows} rows with {seats} seats in each row. At the evening show {empty} seats were "
            f"empty, and "
            f"every second visitor bought a drink. About how many drinks were sold?",
            f"A {place} has {rows} rows of {seats} seats. The first 3 rows are kept free for guests of honor. If "
            f"{empty} of the other seats are still for sale, how many tickets have been sold?",
        ]
    )


@problem
def wp_ratio(rng: random.Random) -> str:
    who = person(rng)
    a, b = rng.choice([(2, 3), (3, 5), (1, 4), (4, 5), (3, 7), (2, 5)])
    k = rng.randint(4, 20)
    return rng.choice(
        [
            f"{who.name} mixes paint using blue and yellow in the ratio {a} to {b}. {who.He} needs {(a + b) * k} "
            f"liters of "
            f"green paint. How many liters of yellow paint does {who.he} need?",
            f"In a choir the ratio of men to women is {a}:{b}. There are {b * k} women. How many people sing in the "
            f"choir?",
            f"The ratio of cats to dogs at a shelter is {a}:{b}, and there are {(b - a) * k} more dogs than cats. "
            f"How many "
            f"animals are at the shelter?",
        ]
    )


@problem
def wp_fence_posts(rng: random.Random) -> str:
    who = person(rng)
    gap, count = rng.randint(3, 9), rng.randint(8, 30)
    thing = rng.choice(["trees", "lamp posts", "flags", "fence posts"])
    where = rng.choice(["along one side of a straight road", "along both sides of a straight path"])
    return (
        f"{who.name} sets up {thing} {where} that is {gap * count} meters long. There is one at each end and the "
        f"distance between neighbors is always {gap} meters. How many {thing} does {who.he} need?"
    )


@problem
def wp_library_books(rng: random.Random) -> str:
    start, per_day, days = 50 * rng.randint(6, 30), rng.randint(12, 45), rng.randint(3, 6)
    back, new = rng.randint(5, 11), 10 * rng.randint(2, 12)
    return (
        f"A small library has {start:,} books. Over {days} days, {per_day} books are borrowed and {back} are returned "
        f"each day. At the end of that time {new} new books arrive. How many books are in the library then?"
    )


@problem
def wp_heights(rng: random.Random) -> str:
    one, two, three = people(rng, count=3)
    what, unit = rng.choice(
        [("sunflower", "centimeters"), ("bean plant", "centimeters"), ("block tower", "centimeters")]
    )
    height, more = rng.randint(60, 140), rng.randint(8, 30)
    return (
        f"{one.name}'s {what} is {height} {unit} tall. {two.name}'s is {more} {unit} taller, and {three.name}'s is "
        f"{rng.choice(['half as tall', 'twice as tall'])} as {one.name}'s. How many {unit} is the tallest one taller "
        f"than the shortest one?"
    )


@problem
def wp_teams(rng: random.Random) -> str:
    sport = rng.choice(["volleyball", "handball", "relay", "quiz", "rowing"])
    groups, size, refs = rng.randint(4, 9), rng.randint(4, 8), rng.randint(2, 6)
    kids, adults = groups * size, groups
    return rng.choice(
        [
            f"{kids + refs} people sign up for a {sport} tournament. {refs} of them agree to be referees, and the "
            f"others "
            f"form teams of {size}. Every team plays every other team once. How many games are played?",
            f"A {sport} club has {kids} young members in teams of {size}, and each team has one coach. On Saturday "
            f"{refs} of the young members and one coach are ill. How many members and coaches out of the "
            f"{kids + adults} come to training?",
        ]
    )


@problem
def wp_working_backward(rng: random.Random) -> str:
    who = person(rng)
    left, gave = rng.randint(4, 20), rng.randint(3, 15)
    thing = rng.choice(["candies", "grapes", "walnuts", "balloons", "crayons"])
    return rng.choice(
        [
            f"{who.name} gave half of {who.his} {thing} to {who.his} sister and then gave {gave} to a friend. Now "
            f"{who.he} has {left} {thing}. How many did {who.he} have at the start?",
            f"{who.name} lost {gave} {thing} and then gave away a third of the others. {who.He} has {2 * left} left. "
            f"How many {thing} were there to begin with?",
        ]
    )


@problem
def wp_calories(rng: random.Random) -> str:
    who = person(rng)
    snack, kcal = rng.choice([("banana", 90), ("granola bar", 120), ("slice of toast", 75), ("boiled egg", 70)])
    limit, count, minutes = 100 * rng.randint(17, 23), rng.randint(2, 4), 10 * rng.randint(2, 6)
    burn, lunch = rng.choice([5, 8, 10]), 10 * rng.randint(45, 70)
    return (
        f"{who.name} wants to stay at {limit:,} calories a day. So far {who.he} has had {count} servings of a snack "
        f"(one "
        f"{snack}, {kcal} calories each) and a lunch of {lunch} calories. A run of {minutes} minutes burned {burn} "
        f"calories per minute, which {who.he} may eat in addition. How many calories are left for today?"
    )
