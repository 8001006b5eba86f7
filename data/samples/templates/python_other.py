"""Other Python requests: bugs to fix, code to read or rewrite, small classes and scripts, questions on the language."""

from __future__ import annotations

from functools import partial

from data.samples.templates.base import slots
from data.samples.templates.python_render import FOLLOWUPS

BUGGY = [
    (
        "return the average of a list",
        "def average(numbers):\n    total = 0\n    for n in numbers:\n        total = n\n"
        "    return total / len(numbers)",
    ),
    ("count the words in a sentence", "def count_words(sentence):\n    return len(sentence.split(''))"),
    (
        "find the largest number",
        "def largest(numbers):\n    best = 0\n    for n in numbers:\n        if n > best:\n"
        "            best = n\n    return best  # fails when all numbers are negative",
    ),
    ("add an item to a list", "def add_item(item, items=[]):\n    items.append(item)\n    return items"),
    ("check whether a number is even", "def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False"),
    (
        "remove all empty strings from a list",
        "def clean(lines):\n    for line in lines:\n        if line == '':\n"
        "            lines.remove(line)\n    return lines",
    ),
    ("compute a factorial", "def factorial(n):\n    return n * factorial(n - 1)"),
    ("print the numbers from 1 to n", "def show(n):\n    for i in range(n):\n        print(i)"),
    ("join names with commas", "def join_names(names):\n    return names.join(', ')"),
    ("read a number and double it", "value = input('Number: ')\nprint('Doubled:', value * 2)"),
    ("return the last three items", "def last_three(items):\n    return items[-1:-3]"),
    ("count down to zero", "n = 5\nwhile n > 0:\n    print(n)\nprint('Lift-off!')"),
    (
        "sum the values of a dictionary",
        "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result",
    ),
    ("sort a list and return it", "def ordered(items):\n    return items.sort()"),
]
SNIPPETS = [
    "counts = {}\nfor letter in 'mississippi':\n    counts[letter] = counts.get(letter, 0) + 1\nprint(counts)",
    "squares = [n * n for n in range(10) if n % 3 == 0]\nprint(squares)",
    "def mystery(n):\n    return n if n < 10 else mystery(n // 10) + n % 10\n\nprint(mystery(4821))",
    "a, b = 0, 1\nwhile a < 50:\n    print(a, end=' ')\n    a, b = b, a + b",
    "text = 'level'\nprint(text == text[::-1])",
    "pairs = zip(['x', 'y', 'z'], [3, 1, 2])\nprint(sorted(pairs, key=lambda p: p[1]))",
    "def make_adder(k):\n    def add(n):\n        return n + k\n    return add\n\nprint(make_adder(3)(4))",
    "import itertools\nfor pair in itertools.combinations('abc', 2):\n    print(pair)",
    "numbers = [4, 8, 15, 16, 23, 42]\nprint(numbers[::-2], max(numbers) - min(numbers))",
    "data = {'a': [1, 2], 'b': [3]}\nprint({k: sum(v) for k, v in data.items()})",
    "try:\n    print(10 / int('0'))\nexcept ZeroDivisionError:\n    print('no')\nfinally:\n    print('done')",
    "def gen():\n    n = 1\n    while True:\n        yield n\n        n *= 2\n\ng = gen()\nprint([next(g) for _ in "
    "range(6)])",
    "from collections import Counter\nprint(Counter('banana').most_common(2))",
    "x = [1, 2, 3]\ny = x\ny.append(4)\nprint(len(x), x is y)",
]
CLASSES = [
    "a bank account with deposit, withdraw and balance methods",
    "a stack with push, pop, peek and is_empty methods",
    "a shopping cart that can add items, remove items and compute the total",
    "a simple to-do list with tasks that can be marked as done",
    "a rectangle with area, perimeter and a method that tells whether it is a square",
    "a deck of 52 playing cards that can be shuffled and dealt",
    "a temperature that converts between Celsius and Fahrenheit",
    "a library that lends books to members",
    "a fixed-size cache that forgets the oldest entry",
    "a two-dimensional vector that supports addition, subtraction and length",
    "a parking lot with a limited number of spaces",
    "a queue built from two lists",
    "a singly linked list with append, remove and length",
    "a countdown timer that can be paused",
    "a fraction that is always kept in lowest terms",
]
SCRIPTS = [
    "renames all .jpeg files in a folder to .jpg",
    "counts the lines, words and characters of a text file",
    "reads a CSV file and prints the average of its second column",
    "finds duplicate files in a folder by their hash",
    "prints the ten most common words of a text file",
    "plays a number guessing game with the user",
    "reads a JSON file and prints it with an indentation of two spaces",
    "generates a random password of a given length",
    "plays rock, paper, scissors against the user",
    "prints a multiplication table up to 12",
    "merges several CSV files with the same columns into one",
    "prints a calendar of the current month",
    "converts all PNG files of a folder into a list of names and sizes",
    "tracks daily expenses in a CSV file",
    "draws a simple bar chart in the terminal",
]
LOOPS = [
    "result = []\nfor n in numbers:\n    if n > 0:\n        result.append(n * 2)",
    "names = []\nfor person in people:\n    names.append(person['name'].title())",
    "total = 0\nfor row in rows:\n    for value in row:\n        total = total + value",
    "found = False\nfor word in words:\n    if word.startswith('a'):\n        found = True",
    "lengths = {}\nfor word in words:\n    lengths[word] = len(word)",
    "i = 0\nwhile i < len(items):\n    print(i, items[i])\n    i = i + 1",
    "text = ''\nfor part in parts:\n    text = text + part + ', '\ntext = text[:-2]",
    "if x == 1 or x == 2 or x == 3 or x == 5:\n    print('small')",
    "f = open('notes.txt')\nlines = f.readlines()\nf.close()",
    "flat = []\nfor inner in nested:\n    for item in inner:\n        flat.append(item)",
]
CONCEPTS = [
    "a list and a tuple",
    "`is` and `==`",
    "a shallow copy and a deep copy",
    "`append` and `extend`",
    "a function and a method",
    "a class and an object",
    "`*args` and `**kwargs`",
    "a generator and a list",
    "a module and a package",
    "`break` and `continue`",
    "a set and a frozenset",
    "an instance variable and a class variable",
    "`sort` and `sorted`",
    "a thread and a process",
    "`range` and `enumerate`",
    "a syntax error and an exception",
]
PANDAS = [
    "drop all rows with a missing value in the column `price`",
    "group a table by `city` and compute the mean of `income`",
    "sort the rows by `date`, newest first",
    "add a column `total` that is `price` times `quantity`",
    "keep only the rows in which `age` is between 18 and 30",
    "join two tables on the column `user_id`",
    "count how often each value occurs in the column `color`",
    "replace missing values in `height` by the median",
    "read a CSV file that uses semicolons and decimal commas",
    "turn the column `when` from text into dates and extract the month",
    "pivot a long table with the columns `day`, `shop` and `sales` into one column per shop",
    "find the row with the largest `score` for each `team`",
]
SQL = [
    "lists the five customers with the highest total of orders",
    "counts the orders of each month in 2023",
    "finds all products that were never ordered",
    "shows the average price per category, highest first",
    "finds customers who ordered at least three times",
    "returns the second most expensive product",
    "lists all orders together with the name of the customer",
    "deletes all orders older than five years",
]

_python = partial(slots, category="python", followups=FOLLOWUPS, weight=1.3)
TEMPLATES = [
    _python(
        "py_other_fix_bug",
        texts=[
            "This code should {bug[0]}, but it does not work. Find the bug and fix it.\n```python\n{bug[1]}\n```",
            "What is wrong with this Python code? It is meant to {bug[0]}.\n```python\n{bug[1]}\n```",
            "Please correct the following code, which should {bug[0]}, and explain the mistake:\n\n{bug[1]}",
        ],
        values={"bug": BUGGY},
    ),
    _python(
        "py_other_explain_snippet",
        texts=[
            "What does this Python code print, and why?\n```python\n{code}\n```",
            "Explain step by step what the following code does:\n```python\n{code}\n```",
            "I am new to Python. Can you explain this code to me?\n\n{code}",
        ],
        values={"code": SNIPPETS},
    ),
    _python(
        "py_other_class",
        texts=[
            "Write a Python class for {thing}.",
            "Create a Python class that models {thing}. Use type hints and docstrings.",
            "Write a small Python class for {thing}, and show how to use it.",
        ],
        values={"thing": CLASSES},
    ),
    _python(
        "py_other_script",
        texts=[
            "Write a Python script that {job}.",
            "I need a short Python program that {job}. Can you write it?",
            "Write a command-line program in Python that {job}. Use only the standard library.",
        ],
        values={"job": SCRIPTS},
    ),
    _python(
        "py_other_idiomatic",
        texts=[
            "Rewrite this code in a more Pythonic way:\n```python\n{code}\n```",
            "Can this be written in fewer lines?\n```python\n{code}\n```",
            "Improve the style of this Python code and explain your changes:\n```python\n{code}\n```",
        ],
        values={"code": LOOPS},
    ),
    _python(
        "py_other_concepts",
        texts=[
            "What is the difference between {pair} in Python? Give a short example.",
            "Explain the difference between {pair} in Python to a beginner.",
            "When would I care about the difference between {pair} in Python?",
        ],
        values={"pair": CONCEPTS},
    ),
    _python(
        "py_other_pandas",
        texts=[
            "How do I {job} with pandas?",
            "In pandas, I want to {job}. What is the code?",
            "Show me a short pandas example: {job}.",
        ],
        values={"job": PANDAS},
    ),
    _python(
        "py_other_sql",
        texts=[
            "Write an SQL query that {job}. The tables are customers(id, name), orders(id, customer_id, date, total) "
            "and "
            "products(id, name, category, price, order_id).",
            "I have tables customers, orders and products in SQLite. Write a Python function that {job}.",
        ],
        values={"job": SQL},
    ),
]
