"""Makes demo_prompts.parquet, the demo's input: `python pipeline/assets/make_demo_prompts.py`.

The shipped tiny model was trained on questions worded as here, each with one right answer, and on
stories, which have none. The seed is fixed: the file comes out the same each time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NUM_ROWS = 300
ROW_GROUP_ROWS = 50
SEED = 2024

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin",
    "Japan": "Tokyo", "China": "Beijing", "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima",
    "Chile": "Santiago", "Canada": "Ottawa", "Iceland": "Reykjavik", "Romania": "Bucharest",
}  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("happy", "sad"),
    ("light", "dark"), ("wet", "dry"), ("hard", "soft"), ("full", "empty"), ("old", "new"),
]  # fmt: skip
WORDS = (
    "apple river stone cloud tiger bread chair green house light music ocean paper queen robot sugar "
    "table water yellow zebra banana candle dragon garden island lemon market orange pencil rabbit silver"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo".split()
CITIES = "Paris Rome Oslo Tokyo Lima Cairo Vienna Dublin Madrid Berlin".split()
ANIMALS = "cat dog fox owl bear mouse rabbit turtle frog duck".split()

# A question and its one right answer; None where there are many.
Task = tuple[str, str | None]


def add(r: random.Random) -> Task:
    a, b = r.randint(0, 99), r.randint(0, 99)
    question = r.choice(["What is {} + {}?", "Add {} and {}.", "Compute {} + {}.", "{} + {} = ?"])
    return question.format(a, b), f"{a} + {b} = {a + b}"


def subtract(r: random.Random) -> Task:
    b, a = sorted((r.randint(0, 50), r.randint(0, 50)))
    question = r.choice(["What is {} - {}?", "Compute {} - {}.", "{} - {} = ?"])
    return question.format(a, b), f"{a} - {b} = {a - b}"


def multiply(r: random.Random) -> Task:
    a, b = r.randint(0, 12), r.randint(0, 12)
    question = r.choice(["What is {} * {}?", "Multiply {} by {}.", "{} times {} = ?"])
    return question.format(a, b), f"{a} * {b} = {a * b}"


def capital(r: random.Random) -> Task:
    country = r.choice(sorted(CAPITALS))
    question = r.choice(["What is the capital of {}?", "Name the capital of {}.", "Capital of {}?"])
    return question.format(country), f"The capital of {country} is {CAPITALS[country]}."


def opposite(r: random.Random) -> Task:
    word, answer = r.sample(r.choice(OPPOSITES), 2)
    question = r.choice(["What is the opposite of {}?", "Give an antonym of {}."])
    return question.format(word), f"The opposite of {word} is {answer}."


def spell(r: random.Random) -> Task:
    word = r.choice(WORDS)
    return r.choice(["Spell the word {}.", "How do you spell {}?"]).format(word), "-".join(word)


def weekday(r: random.Random) -> Task:
    day = r.randrange(len(DAYS))
    where, step = r.choice([("after", 1), ("before", -1)])
    return f"Which day comes {where} {DAYS[day]}?", DAYS[(day + step) % len(DAYS)]


def sort_numbers(r: random.Random) -> Task:
    numbers = [r.randint(0, 9) for _ in range(r.randint(3, 5))]
    question = r.choice(["Sort these numbers: {}", "Put in ascending order: {}"])
    return question.format(_listed(numbers)), _listed(sorted(numbers))


def reverse(r: random.Random) -> Task:
    words = r.sample(WORDS, r.randint(2, 4))
    return f"Reverse this list: {_listed(words)}", _listed(words[::-1])


def larger(r: random.Random) -> Task:
    a, b = r.sample(range(100), 2)
    return f"Which number is larger, {a} or {b}?", str(max(a, b))


def parity(r: random.Random) -> Task:
    number = r.randint(0, 999)
    return f"Is {number} even or odd?", f"{number} is {'odd' if number % 2 else 'even'}."


def extract(r: random.Random) -> Task:
    name, age, city = r.choice(NAMES), r.randint(18, 90), r.choice(CITIES)
    question = r.choice(
        [
            "Extract JSON: {} is {} years old and lives in {}.",
            "Return JSON with name, age and city: {}, {}, {}.",
        ]
    )
    return question.format(name, age, city), json.dumps({"name": name, "age": age, "city": city})


def story(r: random.Random) -> Task:
    animal = r.choice(ANIMALS)
    return r.choice(["Write a short story about a {}.", "Tell me a story about a {}."]).format(animal), None


KINDS: list[Callable[[random.Random], Task]] = [
    add, subtract, multiply, capital, opposite, spell, weekday, sort_numbers, reverse, larger, parity,
    extract, story,
]  # fmt: skip


def demo_prompts() -> pa.Table:
    r = random.Random(SEED)
    rows = []
    for number in range(NUM_ROWS):
        kind = KINDS[number % len(KINDS)]
        prompt, expected = kind(r)
        rows.append((f"demo-{number:03d}", kind.__name__, prompt, expected))
    schema = pa.schema([(name, pa.string()) for name in ("id", "kind", "prompt", "expected")])
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(column, pa.string()) for column in columns], schema=schema)


def _listed(values: list[int] | list[str]) -> str:
    return ", ".join(str(value) for value in values)


def main() -> None:
    path = Path(__file__).with_name("demo_prompts.parquet")
    pq.write_table(demo_prompts(), path, row_group_size=ROW_GROUP_ROWS, compression="zstd")
    print(f"{path}: {NUM_ROWS} rows")


if __name__ == "__main__":
    main()
