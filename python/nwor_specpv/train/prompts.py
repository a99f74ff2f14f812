"""First words of training texts, and the held-out prompts.

The target writes its own training data. A text begins with a few given words. Some more are sampled
at temperature 1 (a user's question, the rest of a first sentence, a signature). Then the target
answers. Everyday questions (`questions`) are given whole or cut short. Held-out prompts are whole
and never trained on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nwor_specpv.errors import NworError

from .chat_format import CHATML, ChatFormat
from .questions import question

KINDS = ("chat", "story", "code", "text")
# Per cent of the texts.
SHARES = {"chat": 52, "story": 18, "code": 20, "text": 10}

_SYSTEMS = (
    *["You are a helpful AI assistant named SmolLM, trained by Hugging Face"] * 8,
    "You are a helpful assistant.",
    "You are a concise expert. Answer in plain words.",
)

_QUESTIONS = (
    "What is", "What are the", "What does", "What would happen if", "Which", "Who", "Why is",
    "Why do", "When", "Where", "How do I", "How does", "How can I", "How would you", "Is it",
    "Can you", "Could you please", "Do you", "Should I", "Explain", "Explain how", "Describe",
    "Define", "Tell me about", "Tell me a story about", "Write a", "Write a short story about",
    "Write a poem about", "Write an email to", "Write a Python function that",
    "Write a Python program to", "Write a JavaScript function", "Write a SQL query that",
    "Write a short paragraph about", "Write a letter to", "Create a", "Create a list of",
    "Give me", "Give me three", "Give me 5 ideas for", "Give an example of", "List",
    "List five", "Name", "Suggest", "Help me", "I want to", "I am", "I have a", "I need",
    "My", "Please", "Summarize", "Summarize the following text:", "Rewrite the following sentence:",
    "Translate", "Correct the grammar of this sentence:", "Compare", "The difference between",
    "Plan a", "Design a", "Imagine", "Calculate", "Solve", "Find the", "If", "In", "The", "A",
    "Make a", "Discuss", "Analyze", "Classify", "Convert", "Come up with", "Generate", "Outline",
    "Recommend", "Hello", "Hi,", "Hey! Can you", "Thanks!", "Teach me", "Show me how to",
    "What's the best way to", "What is the capital of", "How many", "How much", "Act as",
    "Write code that", "Fix this code:", "Explain this code:", "Write a class in Python for",
    "Write a haiku about", "Write a dialogue between", "Write a product description for",
)  # fmt: skip

_NAMES = (
    "Lily", "Tom", "Mara", "Elias", "Anna", "Ben", "Sofia", "Max", "Mia", "Leo", "Clara", "Sam",
    "Nora", "Jack", "Ruby", "Oscar", "Ella", "Finn", "Zara", "Hugo", "Ivy", "Theo", "Amara",
    "Kofi", "Yuki", "Priya", "Diego", "Fatima", "Ingrid", "Pavel", "Grace", "Omar", "Lucy", "Noah",
)  # fmt: skip
_BEINGS = (
    "girl", "boy", "fox", "dragon", "farmer", "sailor", "robot", "rabbit", "princess", "baker",
    "bear", "wizard", "teacher", "king", "cat", "dog", "mouse", "soldier", "doctor", "thief",
    "painter", "fisherman", "detective", "ghost", "student", "queen", "owl", "astronaut",
)  # fmt: skip
_QUALITIES = (
    "little", "old", "brave", "lonely", "clever", "young", "curious", "poor", "kind", "shy",
    "proud", "tired", "happy", "strange", "quiet", "famous",
)  # fmt: skip
_PLACES = (
    "forest", "village", "city", "castle", "island", "desert", "mountain", "lake", "school",
    "garden", "library", "lighthouse", "market", "valley", "spaceship", "harbour", "farm", "cave",
)  # fmt: skip
_STORIES = (
    "Once upon a time, there was a {quality} {being} named {name}",
    "Once upon a time, in a {quality} {place}, there lived a {being}",
    "Once upon a time",
    "One day, a {quality} {being}",
    "One day, {name} went to the {place}",
    "{name} was a {quality} {being} who",
    "{name} had always",
    "{name} opened the door and",
    "It was a cold night in the {place} when {name}",
    "It was a bright morning, and the {being}",
    "The {being} looked at the {place} and",
    "The {quality} {being} lived in a {place}",
    "Long ago, in a {place} far away, a {being}",
    "In the heart of the {place} there was a",
    "In the {place}, {name} and {name2}",
    "When {name} woke up that morning,",
    "When the {being} came back to the {place},",
    "There was once a {being} who",
    "Nobody in the {place} knew that {name}",
    "{name} and {name2} were best friends.",
    "The last time {name} saw the {place},",
    "As the sun set over the {place}, {name}",
    "Every summer, {name} and the {being}",
    '"Where are you going?" asked {name}.',
    '"I am not afraid," said the {being}.',
    "Chapter 1\n\n{name}",
    "The letter arrived on a Tuesday. {name}",
    "My grandmother used to tell me about the {being} of the {place}.",
    "I was standing in the {place} when",
    "For three days the {being} had walked through the {place}",
)
_VERBS = (
    "add", "get", "find", "count", "remove", "is", "sort", "merge", "parse", "read", "write",
    "compute", "convert", "check", "create", "update", "load", "save", "print", "reverse", "split",
    "filter", "max", "min", "sum", "validate", "build", "search", "insert", "delete", "generate",
)  # fmt: skip
_OBJECTS = (
    "list", "string", "number", "file", "tree", "node", "matrix", "array", "words", "user",
    "prime", "even", "factorial", "fibonacci", "data", "path", "dict", "items", "date", "json",
    "graph", "value", "image", "text", "csv", "queue", "stack", "vowels", "duplicates", "average",
)  # fmt: skip
_CODE = (
    "def {verb}_{object}(",
    "def {verb}_{object}({object}):\n",
    'def {verb}_{object}({object}):\n    """',
    "def {object}(n):\n    if n",
    "def {verb}_{object}(self",
    "class {Object}:\n    def __init__(self",
    "class {Object}({Object2}):\n",
    "import numpy as np\n\n",
    "import os\nimport sys\n\n",
    "import pandas as pd\n\n",
    "import random\n\ndef {verb}_{object}(",
    "from collections import",
    "from typing import List\n\ndef {verb}_{object}(",
    "# {Verb} the {object}\n",
    "# Python program to {verb} a {object}\n",
    "import torch\nimport torch.nn as nn\n\nclass {Object}(nn.Module):\n",
    "#include <stdio.h>\n\nint main",
    "#include <iostream>\nusing namespace std;\n\n",
    "int {verb}_{object}(int",
    "public class {Object} {{\n",
    "public static int {verb}{Object}(",
    "function {verb}{Object}(",
    "const {verb}{Object} = (",
    "let {object} = ",
    "SELECT ",
    "CREATE TABLE {object}",
    "<html>\n<head>\n",
    "fn {verb}_{object}(",
    "func {verb}{Object}(",
    "for i in range(",
    "while True:\n",
    "{object} = [",
    "def test_{verb}_{object}():\n",
    "if __name__ == ",
    "```python\n",
    "Here is a Python function that {verb}s a {object}:\n\n```python\n",
)
_TEXTS = (
    "The", "In", "A", "This", "It is", "There are", "When", "As", "For", "How to", "What is",
    "The history of", "The first", "According to", "One of the", "In recent years,", "Introduction",
    "# ", "## ", "1. ", "The most important", "Many people", "Scientists", "Water", "During the",
    "The city of", "A new study", "To make", "Ingredients:", "The company", "Children", "Energy",
    "The human", "Dear", "We", "I", "Today,", "Although", "Before", "Music", "Language", "Health",
)  # fmt: skip

# Never trained on: what acceptance is measured with.
HELD_OUT = {
    "chat": (
        "What causes the seasons on Earth?",
        "Give me a simple recipe for vegetable soup.",
        "How do vaccines help the body fight disease?",
        "Write a polite email asking my landlord to repair the heating.",
        "What is the difference between a virus and a bacterium?",
        "I can't sleep at night. What should I try?",
        "Explain recursion to a ten-year-old.",
        "Suggest three names for a small coffee shop by the sea and say why.",
        "Who was Marie Curie?",
        "Write a Python function that returns the n-th Fibonacci number.",
        "What are the advantages of riding a bicycle to work?",
        "Tell me a short story about a lighthouse keeper who finds a bottle.",
        "How does a refrigerator work?",
        "Write a short poem about autumn rain.",
        "What should I pack for a weekend of hiking?",
        "Summarize the plot of Romeo and Juliet in a few sentences.",
        "How can I learn to play the guitar by myself?",
        "Why is the sky blue?",
        "List five ways to save water at home.",
        "What is photosynthesis?",
        "Explain the difference between a list and a tuple in Python.",
        "How do I ask my boss for a raise?",
        "What makes a good team leader?",
        "Describe a typical day in a medieval town.",
    ),
    "story": (
        "Once upon a time, a baker found a golden key inside a loaf of bread.",
        "The train had stopped in the middle of the fields, and nobody knew why. Clara put down",
        "On the edge of the swamp stood a house that everyone believed to be empty.",
        "Grandfather's clock had not moved for twenty years, until the night when",
        "The two brothers had not spoken since the war. That autumn,",
        "Deep under the sea, a young octopus was learning to write.",
        "The snow began on Monday and did not stop. By Friday the whole village",
        "Detective Moreau looked at the broken window and smiled.",
        "There was a tiny dragon who was afraid of fire.",
        '"You are late," said the old woman, without looking up from her knitting.',
        "When the circus left town, it forgot an elephant.",
        "Captain Reyes had crossed the ocean eleven times, but never like this.",
        "The map was drawn on the back of a menu, and it showed",
        "A boy named Tim had a red balloon. He",
        "Nobody had ever seen the gardener of the palace, yet every morning the roses",
        "The first robot to go to school was called Pixel. On the first day,",
    ),
    "code": (
        'def is_palindrome(text):\n    """Return True if text reads the same backwards."""\n',
        "def binary_search(numbers, target):\n",
        "class BankAccount:\n    def __init__(self, owner, balance=0):\n",
        "import csv\n\ndef average_of_column(path, column):\n",
        "def word_count(text):\n    counts = {}\n",
        "# Print the multiplication table of a number\n",
        "def gcd(a, b):\n",
        "function debounce(callback, delay) {\n",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
        "#include <stdio.h>\n\nint power(int base, int exponent) {\n",
        "def celsius_to_fahrenheit(celsius):\n",
        "import math\n\nclass Circle:\n",
        "def bubble_sort(values):\n    n = len(values)\n",
        "public class Rectangle {\n    private double width;\n",
        "def flatten(nested):\n    result = []\n",
        "SELECT name, COUNT(*) FROM orders\n",
    ),
}

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Opening:
    """The given first tokens of a text, and how many more are sampled at most."""

    kind: str
    tokens: list[int]
    invented: tuple[int, int]  # range of the limit; (0, 0): none are sampled
    answer: list[int]  # ids between the sampled tokens and the answer


def read_opening(entry: Any, vocabulary: int) -> Opening:
    """Reads an entry of a file; raises if it does not fit a target of that vocabulary."""
    names = sorted(Opening.__dataclass_fields__)
    if not isinstance(entry, dict) or sorted(entry) != names:
        got = f"fields {', '.join(sorted(entry))}" if isinstance(entry, dict) else repr(entry)
        raise NworError(f"got {got}, expected {', '.join(names)}")
    if entry["kind"] not in KINDS:
        raise NworError(f"kind: got {entry['kind']!r}, expected one of {', '.join(KINDS)}")
    for name in ("tokens", "answer"):
        _require_ids(name, entry[name], vocabulary)
    if not entry["tokens"]:
        raise NworError("tokens: got none, expected one or more")
    invented = entry["invented"]
    pair = isinstance(invented, list) and len(invented) == 2 and all(map(_whole, invented))
    if not pair or not 0 <= invented[0] <= invented[1]:
        raise NworError(
            f"invented: got {invented!r}, expected two numbers from 0 on, the smaller first"
        )
    return Opening(**{**entry, "invented": tuple(invented)})


def _require_ids(name: str, ids: Any, vocabulary: int) -> None:
    if not isinstance(ids, list):
        raise NworError(f"{name}: got {ids!r}, expected a list")
    for place, token in enumerate(ids):
        if not _whole(token) or not 0 <= token < vocabulary:
            raise NworError(f"{name}[{place}]: got {token!r}, expected 0 to {vocabulary - 1}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def openings(
    encode: Encode, count: int = 4096, seed: int = 0, chat: ChatFormat = CHATML
) -> list[Opening]:
    """Returns `count` openings, kinds in the proportions of SHARES."""
    rng = random.Random(seed)
    between = encode(chat.answer)[1:]  # without the end of the question, which the target writes
    made = []
    for kind in _deal(count):
        if kind == "chat":
            words = rng.choice(("", *_QUESTIONS)) if rng.random() < 0.8 else ""
            tokens = encode(chat.question(words, rng.choice(_SYSTEMS)))
            made.append(Opening(kind, tokens, (12, 72), between))
            continue
        form, invented = {
            "story": (_STORIES, (4, 20)),
            "code": (_CODE, (4, 20)),
            "text": (_TEXTS, (8, 32)),
        }[kind]
        made.append(Opening(kind, encode(_fill(rng.choice(form), rng)), invented, []))
    return made


def asked(
    encode: Encode, count: int = 2560, seed: int = 0, chat: ChatFormat = CHATML
) -> list[Opening]:
    """Returns `count` chats with everyday questions; a quarter are cut short."""
    rng = random.Random(seed)
    between = encode(chat.answer)[1:]
    made: dict[tuple[str, str], Opening] = {}
    while len(made) < count:
        text, system = question(rng), rng.choice(_SYSTEMS)
        if (text, system) in made:
            continue
        if rng.random() >= 0.25:
            opening = Opening("chat", encode(chat.prompt(text, system)), (0, 0), [])
        else:
            words = text.split(" ")
            words = words[: rng.randint(2, max(2, len(words) - 1))]
            tokens = encode(chat.question(" ".join(words), system))
            opening = Opening("chat", tokens, (6, 32), between)
        made[text, system] = opening
    return list(made.values())


def held_out(encode: Encode, chat: ChatFormat = CHATML) -> list[Opening]:
    """Returns the prompts of HELD_OUT, whole."""

    def whole(kind: str, text: str) -> str:
        return chat.prompt(text, _SYSTEMS[0]) if kind == "chat" else text

    return [
        Opening(kind, encode(whole(kind, text)), (0, 0), [])
        for kind, texts in HELD_OUT.items()
        for text in texts
    ]


def _deal(count: int) -> list[str]:
    """Mixes the kinds so that any part of the list has about the right shares."""
    owed = dict.fromkeys(KINDS, 0)
    dealt = []
    for _ in itertools.repeat(None, count):
        for kind in KINDS:
            owed[kind] += SHARES[kind]
        kind = max(KINDS, key=owed.__getitem__)
        owed[kind] -= sum(SHARES.values())
        dealt.append(kind)
    return dealt


def _fill(form: str, rng: random.Random) -> str:
    verb, thing, other = rng.choice(_VERBS), rng.choice(_OBJECTS), rng.choice(_OBJECTS)
    return form.format(
        name=rng.choice(_NAMES),
        name2=rng.choice(_NAMES),
        being=rng.choice(_BEINGS),
        quality=rng.choice(_QUALITIES),
        place=rng.choice(_PLACES),
        verb=verb,
        Verb=verb.capitalize(),
        object=thing,
        Object=thing.capitalize(),
        Object2=other.capitalize(),
    )
