"""Arguments of Python as the library takes them. TypeError: a value of another type; the message names the argument."""
from __future__ import annotations

import math
import operator
from typing import Any

from .errors import InvalidArgument

__all__ = ["integer", "number", "place", "text"]


def integer(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r:.40}; it is an integer") from None


def number(what: str, value: Any) -> float:
    """What is beyond a double becomes infinite."""
    try:
        if not isinstance(value, (str, bytes, bytearray)):
            return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{what} is {value!r:.40}; it is a number")


def text(what: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{what} is {value!r:.40}; it is a string")


def place(first_element: Any, elements: int, multiple: int = 1) -> int:
    """Where an array begins in its tensor. InvalidArgument: no multiple of that, or its end lies beyond 2^64."""
    first = integer("first_element", first_element)
    if first < 0 or first + elements > 2**64:
        shown = first if abs(first) < 2**128 else f"an integer of {first.bit_length()} bits"
        raise InvalidArgument(f"first_element is {shown}, with {elements} elements; all lie from 0 to 2^64 - 1")
    if first % multiple != 0:
        raise InvalidArgument(f"first_element is {first}; it must be a multiple of {multiple}")
    return first
