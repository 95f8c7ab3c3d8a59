"""Pickles of plain values: None, bool, int, float, str, list, tuple, and dict with texts for keys.

Python's reader runs what a pickle names; this one has no instruction that finds a class, calls or imports, and refuses
files with one. A file's size bounds its cost: an instruction makes one value at most, and keys are texts, whose hashes
a file cannot choose. A list may stand in many places: callers bound what they walk.
"""

from __future__ import annotations

import struct
from typing import Any

LEAST_BYTES = 4
"""Of the file, per list, dict and tuple: Python writes none in fewer, but for files of SOME."""
SOME = 1000
_LONGEST_INT = 9  # bytes of an unsigned number of 64 bits with its sign

_CLASSES = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "i": "INST", "o": "OBJ", "R": "REDUCE", "b": "BUILD", "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
"""Instructions that name or make something other than a plain value."""
_PROTO, _FRAME, _STOP, _MARK, _POP = 0x80, 0x95, ord("."), ord("("), ord("0")
_BINGET, _LONG_BINGET, _MEMOIZE, _BINPUT, _LONG_BINPUT = ord("h"), ord("j"), 0x94, ord("q"), ord("r")
_BININT, _BININT1, _BININT2, _LONG1, _BINFLOAT = ord("J"), ord("K"), ord("M"), 0x8A, ord("G")
_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8 = 0x8C, ord("X"), 0x8D
_APPEND, _APPENDS, _SETITEM, _SETITEMS, _TUPLE = ord("a"), ord("e"), ord("s"), ord("u"), ord("t")
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_EMPTY = {ord("]"): list, ord("}"): dict, ord(")"): tuple}


class PickleFault(Exception):
    """No pickle of plain values; the text says why."""


def read_plain(data: bytes) -> Any:
    """Raises PickleFault, and nothing else, for bytes that are none."""
    if data[:1] != bytes([_PROTO]) or not data[1:2] or data[1] > 5:
        raise PickleFault("it does not begin as a pickle of protocol 2 to 5")
    try:
        return _run(data)
    except (IndexError, struct.error):
        raise PickleFault("it is truncated or damaged: a value is missing") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PickleFault(f"it is damaged: {' '.join(str(error).split())[:80]}") from None


def _run(data: bytes) -> Any:
    at, end, made = 2, len(data), 0
    most = SOME + end // LEAST_BYTES
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push = stack.append
    while True:
        op = data[at]
        at += 1
        if op == _LONG_BINGET:
            push(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif op == _BINGET:
            push(memo[data[at]])
            at += 1
        elif op == _BININT1:
            push(data[at])
            at += 1
        elif op == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif op == _BININT:
            push(struct.unpack_from("<i", data, at)[0])
            at += 4
        elif op == _LONG1:
            size = data[at]
            if size > _LONGEST_INT or at + size >= end:
                raise PickleFault(f"it holds a number of {size} bytes")
            push(int.from_bytes(data[at + 1 : at + 1 + size], "little", signed=True))
            at += 1 + size
        elif op == _MARK:
            marks.append(len(stack))
        elif op == _APPENDS:
            height = marks.pop()
            values = stack[height:]
            del stack[height:]
            _of(stack[-1], list).extend(values)
        elif op == _SETITEMS:
            height = marks.pop()
            values = stack[height:]
            del stack[height:]
            _set_items(stack[-1], values)
        elif op in _EMPTY:
            push(_EMPTY[op]())
            made += 1
        elif op in _TUPLES:
            height = len(stack) - _TUPLES[op]
            if height < 0:
                raise IndexError
            stack[height:] = [tuple(stack[height:])]
            made += 1
        elif op == _TUPLE:
            height = marks.pop()
            stack[height:] = [tuple(stack[height:])]
            made += 1
        elif op == _BININT2:
            push(struct.unpack_from("<H", data, at)[0])
            at += 2
        elif op == _BINFLOAT:
            push(struct.unpack_from(">d", data, at)[0])
            at += 8
        elif op in (_SHORT_BINUNICODE, _BINUNICODE, _BINUNICODE8):
            width = {_SHORT_BINUNICODE: 1, _BINUNICODE: 4, _BINUNICODE8: 8}[op]
            begin = at + width
            at = begin + int.from_bytes(data[at:begin], "little")
            if at >= end:
                raise IndexError
            push(str(data[begin:at], "utf-8", "replace"))
        elif op in _CONSTANTS:
            push(_CONSTANTS[op])
        elif op in (_BINPUT, _LONG_BINPUT):
            width = 1 if op == _BINPUT else 4
            memo[int.from_bytes(data[at : at + width], "little")] = stack[-1]
            at += width
        elif op == _APPEND:
            value = stack.pop()
            _of(stack[-1], list).append(value)
        elif op == _SETITEM:
            values = [stack[-2], stack.pop()]
            stack.pop()
            _set_items(stack[-1], values)
        elif op == _FRAME:
            at += 8
        elif op == _POP:
            stack.pop()
        elif op == _STOP:
            return stack.pop()
        else:
            raise _unknown(op, at - 1)
        if made > most:
            raise PickleFault("it holds more lists and dicts than a file of its size can")


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleFault(f"it is damaged: a {kind.__name__} was to be filled, and there is a {type(value).__name__}")
    return value


def _set_items(target: Any, values: list[Any]) -> None:
    keys = values[::2]
    if len(values) % 2 or not all(type(key) is str for key in keys):
        raise PickleFault("it has a dict whose keys are not texts")
    _of(target, dict).update(zip(keys, values[1::2]))


def _unknown(op: int, at: int) -> PickleFault:
    name = _CLASSES.get(chr(op))
    if name is not None:
        return PickleFault(
            f"it asks for a class or a call (instruction {name} at byte {at}), which no memory snapshot does; nothing "
            "of it was run"
        )
    return PickleFault(f"byte {at} ({op:#04x}) is no instruction of a pickle of plain values")
