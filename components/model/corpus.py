"""The testbed's own small world: short chats made by rule, so that a tiny model can learn to answer them.

Each kind of chat has a fixed wording and answers that follow from it. A quarter of the chats think first; the others
carry the empty thought that the chat template writes when thinking is off.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

COLOURS = {
    "grass": "green", "sky": "blue", "snow": "white", "coal": "black", "blood": "red", "lemon": "yellow",
    "orange": "orange", "plum": "purple", "mouse": "grey", "bark": "brown", "rose": "pink", "sand": "gold",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Cuba": "Havana", "Kenya": "Nairobi", "Norway": "Oslo", "Greece": "Athens", "Chile": "Santiago", "Iran": "Tehran",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "new", "up": "down", "left": "right", "wet": "dry",
    "loud": "quiet", "light": "dark", "full": "empty", "hard": "soft", "open": "closed",
}  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Greta", "Hugo", "Ida", "Jon", "Kim", "Leo")
WORDS = (*COLOURS, *OPPOSITES, *OPPOSITES.values())
THINKING_SHARE = 0.25


@dataclass(frozen=True)
class Chat:
    """One question with its answer; ``thought`` is None when thinking is off."""

    category: str
    question: str
    answer: str
    thought: str | None = None


def _colour(draw: random.Random) -> Chat:
    thing = draw.choice(list(COLOURS))
    colour = COLOURS[thing]
    question = draw.choice((f"What colour is {thing}?", f"Tell me the colour of {thing}.", f"Is {thing} {colour}?"))
    return Chat("facts", question, f"The colour of {thing} is {colour}. Everyone knows that {thing} is {colour}.")


def _capital(draw: random.Random) -> Chat:
    country = draw.choice(list(CAPITALS))
    question = draw.choice((f"What is the capital of {country}?", f"Name the capital of {country}, please."))
    return Chat("facts", question, f"The capital of {country} is {CAPITALS[country]}. It is a city in {country}.")


def _opposite(draw: random.Random) -> Chat:
    word = draw.choice(list(OPPOSITES))
    question = draw.choice((f"What is the opposite of {word}?", f"Give me the opposite of {word}."))
    return Chat("words", question, f"The opposite of {word} is {OPPOSITES[word]}.")


def _count(draw: random.Random) -> Chat:
    start, length = draw.randint(1, 12), draw.randint(4, 8)
    numbers = ", ".join(str(number) for number in range(start, start + length))
    return Chat("lists", f"Count from {start} to {start + length - 1}.", f"Here you are: {numbers}. That is all.")


def _sum(draw: random.Random) -> Chat:
    left, right = draw.randint(1, 9), draw.randint(1, 9)
    question = draw.choice((f"What is {left} plus {right}?", f"Add {left} and {right}."))
    return Chat("arithmetic", question, f"{left} plus {right} is {left + right}.")


def _day(draw: random.Random) -> Chat:
    day = draw.randrange(7)
    question = draw.choice((f"Which day comes after {DAYS[day]}?", f"What is the next day after {DAYS[day]}?"))
    return Chat("lists", question, f"The day after {DAYS[day]} is {DAYS[(day + 1) % 7]}.")


def _repeat(draw: random.Random) -> Chat:
    words = " ".join(draw.sample(WORDS, draw.randint(2, 4)))
    return Chat("copying", f"Repeat after me: {words}", f"You said: {words}.")


def _greet(draw: random.Random) -> Chat:
    name, other = draw.sample(NAMES, 2)
    question = f"I am {name}. Say hello to me and to {other}."
    return Chat("copying", question, f"Hello {name}, and hello {other}! It is good to see you, {name}.")


_KINDS = (_colour, _capital, _opposite, _count, _sum, _day, _repeat, _greet)


def chats(seed: int) -> Iterator[Chat]:
    """Yield chats without end; the same ``seed`` gives the same ones."""
    draw = random.Random(seed)
    while True:
        chat = draw.choice(_KINDS)(draw)
        if draw.random() < THINKING_SHARE:
            chat = Chat(chat.category, chat.question, chat.answer, f"This is about {chat.category}.")
        yield chat
