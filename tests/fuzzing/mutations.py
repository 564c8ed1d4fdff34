"""Hostile documents and command lines, from a seed: what a stranger, an editor or a bad disk makes of good ones."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Place: TypeAlias = tuple[Any, Any]  # a container and a key or position in it

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, -0.0, 0.5, 1e-320, 5e-324, 1e308, 1.7976931348623157e308, -1e308, 1e9, 1e18),
    *(2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**100, 10**19, 10**100, 10**4000, -(10**30)),
    *(float("nan"), float("inf"), float("-inf"), 1_000_000_000),
)
EXTREMES = (1e-300, 1e-15, 1e-9, 1e-3, 999999999.9, 2**20 - 1, 2**24, 2**31, 2**50, 2**53, 1e30, 1e29, 2**99)
"""Numbers within some bounds."""
TEXTS: tuple[Any, ...] = (
    *(
        "",
        " ",
        "\0",
        "\x1b[2J\x1b]0;title\x07",
        "\u202e",
        "\ud800",
        "\U0001f600",
        "\r\n",
        "a" * 10_000,
        "../..",
        "/dev/zero",
    ),
    *("cuda:0", "cuda:-1", "cuda:999999999999", "cpu:7", "meta", "cpu", "$\\frac{", "__import__('os')", "nan", "1e400"),
    *("os.system", "float31", "int8", "children", "static export", "1f1b", "gpipe"),
)
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}}, [None], "1", ["a", "b"])


def documents(good: str, seed: int, count: int) -> Iterator[bytes]:
    """Variants of a JSON text, most of them still JSON.

    Args:
        good: the text.
        seed: of the choices.
        count: how many.
    """
    chance = random.Random(seed)
    whole = json.loads(good)
    for _ in range(count):
        variant = copy.deepcopy(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            variant = _changed(variant, chance)
        text = json.dumps(variant, indent=chance.choice((None, 1)))
        if chance.random() < 0.15:
            text = chance.choice(_IN_TEXT)(text, chance)
        encoded = text.encode(errors="surrogatepass")
        yield chance.choice(_IN_BYTES)(encoded, chance) if chance.random() < 0.15 else encoded


def _changed(document: Any, chance: random.Random) -> Any:
    """A document with one change somewhere."""
    places = list(_places(document))
    numbers = [place for place in places if type(place[0][place[1]]) in (int, float)]
    if not places:
        return chance.choice(NUMBERS)
    if numbers and chance.random() < 0.5:
        container, key = chance.choice(numbers)
        near = chance.random() < 0.7
        container[key] = _another(container[key], chance) if near else chance.choice((*NUMBERS, *EXTREMES))
    elif chance.random() < 0.2:
        _changed_everywhere(places, chance)
    else:
        container, key = chance.choice(places)
        chance.choice(_CHANGES)(container, key, places, chance)
    return document


def _replace(container: Any, key: Any, _places: list[Place], chance: random.Random) -> None:
    container[key] = copy.deepcopy(chance.choice((*NUMBERS, *TEXTS, *ODD)))


def _remove(container: Any, key: Any, _places: list[Place], _chance: random.Random) -> None:
    del container[key]


def _copy_from_elsewhere(container: Any, key: Any, places: list[Place], chance: random.Random) -> None:
    other, name = chance.choice(places)
    container[key] = copy.deepcopy(other[name])


def _copy_to_another_key(container: Any, key: Any, _places: list[Place], chance: random.Random) -> None:
    if isinstance(container, list):
        container.insert(chance.randrange(len(container) + 1), copy.deepcopy(container[key]))
    else:
        container[chance.choice(TEXTS)] = container[key]


def _nest(container: Any, key: Any, _places: list[Place], chance: random.Random) -> None:
    for _ in range(chance.choice((1, 2, 50, 150, 400))):
        container[key] = [container[key]] if chance.random() < 0.5 else {"a": container[key]}


def _reorder(container: Any, key: Any, _places: list[Place], chance: random.Random) -> None:
    if isinstance(container[key], list):
        chance.shuffle(container[key])
    else:
        container[key] = str(container[key])


def _repeat(container: Any, key: Any, _places: list[Place], chance: random.Random) -> None:
    value = container[key]
    container[key] = value * chance.choice((0, 2, 100)) if isinstance(value, list) else [value]


_CHANGES = (_replace, _replace, _remove, _copy_from_elsewhere, _copy_to_another_key, _nest, _reorder, _repeat)


def _changed_everywhere(places: list[Place], chance: random.Random) -> None:
    """The same number in all fields of one name: what is sound alone may not be in a sum or a product."""
    named = sorted({key for container, key in places if isinstance(key, str) and type(container[key]) in (int, float)})
    if not named:
        return
    field, number = chance.choice(named), chance.choice((*NUMBERS, *EXTREMES))
    for container, key in places:
        if key == field and container.get(key) is not None:
            container[key] = float(number) if type(container[key]) is float and abs(number) < 1e308 else number


def _another(number: float, chance: random.Random) -> float:
    """A number near this one, or of another order."""
    if not -sys.float_info.max <= number <= sys.float_info.max:  # an integer may be beyond
        return 0.0
    return chance.choice(
        (number + 1, number - 1, -number, number * 2, number * 1_000_000, number / 3, number // 3, number * 0)
    )


def _places(document: Any) -> Iterator[Place]:
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield document, key
            yield from _places(value)


def _twice(text: str, chance: random.Random) -> str:
    """With a key twice."""
    keys = [place for place in range(len(text)) if text.startswith('": ', place)]
    if not keys:
        return text + text
    stop = chance.choice(keys)
    start = text.rindex('"', 0, stop)
    return f"{text[:start]}{text[start : stop + 1]}: {chance.choice(('0', '1e400', '[]', '9' * 5000))}, {text[start:]}"


_IN_TEXT: tuple[Callable[[str, random.Random], str], ...] = (
    _twice,
    _twice,
    lambda text, chance: text.replace("0", chance.choice(("1e400", "-", "0x10", "٣", "9" * 5000)), 1),
    lambda text, _: "\ufeff" + text,
    lambda text, chance: text[: chance.randrange(len(text))],
    lambda text, _: text + text,
    lambda text, _: text.replace("{", "[" * 100_000 + "{", 1),
)
_IN_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda text, chance: b"".join(
        bytes([letter ^ 1 << chance.randrange(8)]) if chance.random() < 0.001 else bytes([letter]) for letter in text
    ),
    lambda text, _: b"\xff\xfe" + text,
    lambda text, chance: text[: (place := chance.randrange(len(text) + 1))] + chance.randbytes(4) + text[place:],
    lambda text, _: text.decode(errors="replace").encode("utf-16"),
    lambda _text, chance: chance.randbytes(64),
    lambda _text, _: b"",
)

VALUES = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1",
        "2",
        "4",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e9",
        "1e400",
        "1e-400",
        "9" * 20,
        "9" * 400,
        "9" * 5000,
    ),
    *(
        "٣",
        "1_000",
        "0x10",
        "+1",
        " 8 ",
        "1,2",
        ",",
        "=",
        "a=",
        "=a",
        "a=b",
        "a=1=2",
        "a=-9999999999999999999999",
        "none",
    ),
    *("none,none", "8GiB", "0GiB", "1e3GiB", "8EiB", "9" * 400 + "GiB", "auto", "gpipe", "cpu", "cpu,cpu", "cuda:0"),
    *(
        "cuda:99999999999999999999",
        "cuda:-1",
        "meta",
        "mps",
        "cpu:-5",
        "cpu:99999999999",
        "\x1b[2J",
        "\udcff",
        "a" * 5000,
    ),
    *(
        "/",
        "/dev/zero",
        "/dev/null",
        "/dev/stdin",
        "/proc/x/y.json",
        "nowhere/x.png",
        "nowhere/x.json",
        ".",
        "..",
        "x.png",
    ),
    *(
        "..:x",
        ":",
        ":x",
        "x:",
        "a.b:c",
        "a..b:c",
        ".py:x",
        "..py:x",
        "a\0b.py:x",
        "a" * 5000 + ".py:x",
        "shop_model.py:x",
    ),
    *(
        "shop_model.py:build",
        "shop_model:build",
        "os:getcwd",
        "json:loads",
        "plan.json",
        "bad.json",
        "--",
        "-",
        "--help",
        "-h",
    ),
    *(
        "AdamW",
        "Optimizer",
        "lr_scheduler",
        "__doc__",
        "SGD",
        "bfloat16",
        "off",
        "\n",
        "%s%n",
        "{0}",
        "inner",
        "outer",
        "inner=cpu",
    ),
)
"""Values for all options: numbers, sizes, names, paths and references that mean nothing here, and some that do."""


def command_lines(options: dict[str, list[str]], seed: int, count: int) -> Iterator[list[str]]:
    """Command lines of hostile values.

    Args:
        options: of each command, its options.
        seed: of the choices.
        count: how many.
    """
    chance = random.Random(seed)
    model, plan = ["shop_model.py:build"], ["plan.json"]
    usual = {
        **dict.fromkeys(("plan", "profile", "trace", "estimate"), model),
        **dict.fromkeys(("show", "explain", "validate", "plot"), plan),
        "diff": [*plan, *plan],
        "what-if": ["profile.json"],
        "run": [*plan, "shop_model.py:train"],
    }
    for _ in range(count):
        command = chance.choice(list(options))
        line = list(usual.get(command, []))
        for place in range(len(line)):
            if chance.random() < 0.3:
                line[place] = chance.choice(VALUES)
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            line += [chance.choice(options[command] or ["--help"]), chance.choice(VALUES)]
        if chance.random() < 0.05:
            line.append(chance.choice(VALUES))
        yield [command if chance.random() < 0.98 else chance.choice(VALUES), *line]
