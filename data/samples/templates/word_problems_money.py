"""Word problems about money: prices, change, discounts, wages, savings, profit and bills."""

from __future__ import annotations

import random

from data.samples.templates.base import Template, listing, people, person, usd
from data.samples.templates.problem import registrar

TEMPLATES: list[Template] = []
problem = registrar(TEMPLATES)


@problem
def wp_discount(rng: random.Random) -> str:
    who = person(rng)
    item = rng.choice(["winter coat", "pair of boots", "bicycle", "desk lamp", "backpack", "guitar", "tent", "camera"])
    price, off = 20 * rng.randint(2, 20), rng.choice([10, 15, 20, 25, 30, 40])
    extra = rng.choice([5, 8, 10, 12])
    return rng.choice(
        [
            f"{who.name} wants to buy a {item} that normally costs ${price}. This week it is {off}% off, and "
            f"{who.he} also "
            f"has a coupon for another ${extra} off the sale price. How much does {who.name} pay?",
            f"A {item} is marked at ${price}. The shop takes {off}% off for members and then adds a ${extra} "
            f"delivery fee. "
            f"What is the total for {who.name}, who is a member?",
        ]
    )


@problem
def wp_shopping_change(rng: random.Random) -> str:
    who = person(rng)
    goods = rng.sample(
        [
            ("notebook", 250),
            ("pen", 75),
            ("eraser", 50),
            ("ruler", 125),
            ("folder", 175),
            ("marker", 225),
            ("sketch pad", 450),
            ("glue stick", 150),
        ],
        3,
    )
    amounts = [rng.randint(2, 6) for _ in goods]
    total = sum(n * price for n, (_, price) in zip(amounts, goods, strict=True))
    bill = next(b for b in (20, 50, 100) if b * 100 > total)
    bought = listing([f"{n} {name}s at {usd(price)} each" for n, (name, price) in zip(amounts, goods, strict=True)])
    return f"{who.name} buys {bought}. {who.He} pays with a ${bill} bill. How much change should {who.he} get back?"


@problem
def wp_hourly_wage(rng: random.Random) -> str:
    who = person(rng)
    job = rng.choice(["a bakery", "a garden center", "a library", "a bike shop", "a cinema", "a car wash"])
    wage, regular, extra = 2 * rng.randint(6, 14), rng.choice([30, 35, 40]), rng.randint(3, 10)
    return rng.choice(
        [
            f"{who.name} works at {job} and earns ${wage} an hour for the first {regular} hours of the week. Every "
            f"hour "
            f"after that is paid at one and a half times the normal rate. If {who.he} worked {regular + extra} hours "
            f"last "
            f"week, how much did {who.he} earn?",
            f"At {job}, {who.name} is paid ${wage} per hour and time and a half for overtime. Last week {who.he} "
            f"worked "
            f"{regular} regular hours and {extra} overtime hours. What was {who.his} pay for the week?",
        ]
    )


@problem
def wp_saving_goal(rng: random.Random) -> str:
    who = person(rng)
    item = rng.choice(["a keyboard", "a telescope", "a skateboard", "a drum kit", "a game console", "a sewing machine"])
    weekly, spend = rng.randint(12, 30), rng.randint(3, 9)
    weeks, start = rng.randint(6, 20), 5 * rng.randint(2, 12)
    cost = start + weeks * (weekly - spend)
    return (
        f"{who.name} is saving for {item} that costs ${cost}. {who.He} already has ${start}. Each week {who.he} gets "
        f"${weekly} for doing chores but spends ${spend} of it on snacks. In how many weeks will {who.he} have enough?"
    )


@problem
def wp_profit_stall(rng: random.Random) -> str:
    one, two = people(rng, count=2)
    item, plural = rng.choice(
        [
            ("cup of lemonade", "cups of lemonade"),
            ("cookie", "cookies"),
            ("bracelet", "bracelets"),
            ("candle", "candles"),
            ("muffin", "muffins"),
            ("badge", "badges"),
        ]
    )
    sold, price = 10 * rng.randint(3, 12), rng.choice([150, 200, 250, 300])
    cost = rng.randint(8, 25)
    return rng.choice(
        [
            f"{one.name} and {two.name} run a stall at the school fair. They spend ${cost} on supplies and sell {sold} "
            f"{plural} for {usd(price)} each. If they share the profit equally, how much does each of them get?",
            f"Making one {item} costs {one.name} {usd(price // 5)}, and {one.he} sells each for {usd(price)}. The "
            f"table "
            f"at the market costs ${cost} to rent. What is {one.his} profit after selling {sold} {plural}?",
        ]
    )


@problem
def wp_split_bill(rng: random.Random) -> str:
    who = person(rng)
    friends, tip = rng.choice([3, 4, 5, 7]), rng.choice([10, 15, 20])
    bill = 20 * (friends + 1) * rng.randint(1, 4)
    place = rng.choice(["a pizza place", "a noodle bar", "a small cafe", "a taco restaurant", "a curry house"])
    return (
        f"{who.name} and {friends} friends eat at {place}. The bill comes to ${bill}, and they decide to leave a "
        f"{tip}% "
        f"tip. They split the total evenly. How much does each person pay?"
    )


@problem
def wp_phone_plan(rng: random.Random) -> str:
    who = person(rng)
    base, included, over = rng.choice([15, 20, 25, 30]), 100 * rng.randint(2, 6), rng.choice([5, 8, 10, 12])
    used = included + 10 * rng.randint(2, 15)
    return (
        f"{who.name}'s phone plan costs ${base} a month and includes {included} minutes of calls. Each extra minute "
        f"costs {over} cents. In {rng.choice(['March', 'June', 'October', 'July'])}, {who.name} talked for {used} "
        f"minutes. How many dollars was {who.his} bill?"
    )


@problem
def wp_ticket_sales(rng: random.Random) -> str:
    event = rng.choice(["school play", "charity concert", "puppet show", "science night", "village football match"])
    adult, child = rng.randint(7, 15), rng.randint(3, 6)
    adults, kids = 5 * rng.randint(8, 40), 5 * rng.randint(8, 40)
    return rng.choice(
        [
            f"Tickets for a {event} cost ${adult} for adults and ${child} for children. On Friday {adults} adults and "
            f"{kids} children came. How much money was collected?",
            f"A {event} sold {adults + kids} tickets in total, {kids} of them to children. Children paid ${child} and "
            f"adults paid ${adult}. The hall cost ${50 * rng.randint(2, 6)} to rent. How much was left after paying "
            f"rent?",
        ]
    )


@problem
def wp_compare_offers(rng: random.Random) -> str:
    who = person(rng)
    item = rng.choice(["printer paper", "dog food", "olive oil", "rice", "coffee beans", "laundry powder"])
    small, big = rng.choice([(2, 5), (3, 10), (4, 10), (2, 8)])
    price = rng.randint(3, 6)
    big_price = price * big // small - rng.randint(1, 3)
    need = big * small * rng.randint(1, 2)
    return (
        f"A shop sells {item} in {small} kg bags for ${price} and in {big} kg bags for ${big_price}. {who.name} needs "
        f"{need} kg. How much does {who.he} save by buying only large bags instead of only small ones?"
    )


@problem
def wp_simple_interest(rng: random.Random) -> str:
    who = person(rng)
    principal, rate, years = 100 * rng.randint(4, 50), rng.choice([2, 3, 4, 5, 6]), rng.randint(2, 6)
    verb = rng.choice(["puts", "deposits", "places"])
    return rng.choice(
        [
            f"{who.name} {verb} ${principal:,} in an account that pays {rate}% simple interest per year. How much "
            f"money "
            f"will be in the account after {years} years?",
            f"{who.name} borrows ${principal:,} from the bank at {rate}% simple interest per year and pays "
            f"everything back "
            f"after {years} years. How much interest does {who.he} pay in total?",
        ]
    )


@problem
def wp_fundraiser(rng: random.Random) -> str:
    one, two, three = people(rng, count=3)
    base, more, times = 5 * rng.randint(4, 14), 5 * rng.randint(1, 6), rng.choice(["twice", "three times"])
    goal = 100 * rng.randint(5, 9)
    cause = rng.choice(["a new playground", "the animal shelter", "a class trip", "the local food bank"])
    return (
        f"Three friends raise money for {cause}. {one.name} collects ${base}. {two.name} collects ${more} more than "
        f"{one.name}, and {three.name} collects {times} as much as {two.name}. Their goal is ${goal}. How much more "
        f"money do they need to reach it, or by how much are they over it?"
    )


@problem
def wp_rent_and_salary(rng: random.Random) -> str:
    who = person(rng)
    salary, rent, food = 200 * rng.randint(10, 25), rng.choice([25, 30, 35, 40]), rng.choice([10, 15, 20])
    rest = 10 * rng.randint(10, 40)
    return (
        f"{who.name} earns ${salary:,} a month. {who.He} spends {rent}% of it on rent, {food}% on food and ${rest} on "
        f"transport and other bills. How much does {who.he} have left at the end of "
        f"{rng.choice(['the month', 'three months', 'half a year'])}?"
    )


@problem
def wp_membership(rng: random.Random) -> str:
    who = person(rng)
    place = rng.choice(["swimming pool", "climbing gym", "museum", "ice rink", "trampoline park"])
    single, visits = rng.randint(6, 14), rng.randint(10, 30)
    yearly = single * rng.randint(5, 9)
    return rng.choice(
        [
            f"One visit to the {place} costs ${single}, while a yearly pass costs ${yearly}. {who.name} plans to go "
            f"{visits} times this year. How much does the pass save {who.him}?",
            f"A yearly pass for the {place} costs ${yearly} and a single visit costs ${single}. What is the smallest "
            f"number "
            f"of visits for which the pass is the cheaper choice?",
        ]
    )


@problem
def wp_sales_tax(rng: random.Random) -> str:
    who = person(rng)
    first, second = rng.sample(
        [
            ("sweater", 40),
            ("scarf", 20),
            ("hat", 15),
            ("jacket", 80),
            ("belt", 25),
            ("pair of jeans", 60),
            ("shirt", 30),
        ],
        2,
    )
    tax, count = rng.choice([5, 8, 10]), rng.randint(2, 4)
    return (
        f"{who.name} goes shopping for clothes. A {first[0]} costs ${first[1]} and a {second[0]} costs ${second[1]}. "
        f"{who.He} buys {count} of the first and one of the second. Sales tax is {tax}%. How much does {who.he} pay "
        f"altogether?"
    )


@problem
def wp_coins(rng: random.Random) -> str:
    who = person(rng)
    quarters, dimes, nickels = rng.randint(5, 20), rng.randint(5, 30), rng.randint(4, 25)
    stamp = rng.choice([("stickers", 25), ("marbles", 15), ("gumballs", 10), ("postcards", 50)])
    return (
        f"{who.name} empties a jar and counts {quarters} quarters, {dimes} dimes and {nickels} nickels. "
        f"{stamp[0].title()} "
        f"cost {stamp[1]} cents each. How many {stamp[0]} can {who.he} buy with all the coins?"
    )


@problem
def wp_resale(rng: random.Random) -> str:
    who = person(rng)
    item = rng.choice(["an old bicycle", "a used piano", "a wooden table", "a vintage radio", "an old boat"])
    buy, repair, gain = 20 * rng.randint(3, 25), 10 * rng.randint(1, 9), rng.choice([20, 25, 30, 50])
    return (
        f"{who.name} buys {item} for ${buy} and spends ${repair} on repairs. For what price must {who.he} sell it to "
        f"make a profit of {gain}% on everything {who.he} spent?"
    )
