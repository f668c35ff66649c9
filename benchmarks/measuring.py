"""What several benchmarks need: prompts and a reward made on the spot, and who else was using the machine.

The standard library only, since a script may run under an interpreter that has nothing else in common with this one.
"""

from __future__ import annotations

import os
import platform
import random
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A whole number above 0; argparse makes an error message of the ValueError."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def word_problem(index: int) -> str:
    draw = random.Random(index)
    name, thing = draw.choice(["Mia", "Omar", "Lena", "Jonas"]), draw.choice(["apples", "books", "candles", "shells"])
    first, second, third = (draw.randint(2, 90) for _ in range(3))
    return (
        f"{name} has {first} {thing} in one box and {second} in another. A friend brings {third} more, and half of "
        f"them are given away on the same day. {f'The next morning {name} finds two more. ' if index % 2 else ''}"
        f"How many {thing} are left in the end? Explain every step of the calculation, and write the number last."
    )


def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Share of vowels, and a little that differs between any two completions, so that no group ties."""
    texts = [item if isinstance(item, str) else item[0]["content"] for item in completions]
    return [vowels(text) + zlib.crc32(repr(list(ids)).encode()) / 1e11 for text, ids in zip(texts, completion_ids)]


def vowels(text: str) -> float:
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def machine_seconds() -> float:
    """Processor time that the machine has spent, or that was taken from it, so far; 0 where only Linux would tell."""
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, file.read_text().split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def foreign_load(wall: float, own: float, busy: float, processors: int) -> float:
    """Share of the machine's processor time that went to others; one tick of 0.01 s a processor is not counted."""
    return max(0.0, busy - own - 0.01 * processors) / (wall * processors)


def processor() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", file.read_text()) if file.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
