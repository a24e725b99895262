"""OpenAI-style message dicts, checked and brought into the order and types of K3's chat format.

What is wrong with a conversation is found here and said in one line; `chat.py` only writes.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from k3jax.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
IMAGE_PARTS = ("image", "image_url")


class Argument(NamedTuple):
    """One argument of a call as it is written.

    Attributes:
        kind: string, number, boolean, null, object or array.
        text: a string itself, anything else as JSON.
    """

    kind: str
    text: str


class Call(NamedTuple):
    """One tool call.

    Attributes:
        id: what results refer to, or None.
        name: of the tool.
        arguments: by key, in the order given.
        broken: the arguments as given if they are no JSON; then `arguments` is empty.
    """

    id: str | None
    name: str
    arguments: dict[str, Argument]
    broken: str | None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message, ready to be written."""

    place: str  # for error messages
    role: str  # one of ROLES
    content: Sequence[str | None] = ()  # texts; None is an image
    name: str = ""  # of a user or system
    tools: Sequence[Any] = ()  # that a system message adds
    reasoning: str = ""  # of the assistant; never only whitespace
    calls: tuple[Call, ...] = ()  # of the assistant
    tool: str = ""  # whose result a tool message is
    index: int = 0  # of a result, counted from 1 since the last assistant message


def conversation(messages: Any) -> Iterator[Turn]:
    """The messages in the order in which they are written; other roles are left out.

    Consecutive tool results come in the order of the calls they answer, under the names of those
    calls, if each names a call of the assistant message before; else in the order given.

    Raises: UserError that names the first bad message.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UserError(f"messages is of type {_kind(messages)}; give a list of message objects")
    calls: tuple[Call, ...] = ()
    results = 0
    checked = (_checked(number, message) for number, message in enumerate(messages, 1))
    for role, run in itertools.groupby(checked, key=lambda item: item[1]["role"]):
        for turn in _results(list(run), calls, results) if role == "tool" else map(_turn, run):
            if turn.role == "assistant":
                calls, results = turn.calls, 0
            elif turn.role == "tool":
                results = turn.index
            if turn.role in ROLES:
                yield turn


def compact_json(value: Any, what: str) -> str:
    """JSON without spaces, keys sorted at every depth, non-ASCII kept.

    Raises: UserError that calls the value `what`.
    """
    return _json(value, what, sort_keys=True, separators=(",", ":"))


def check_tools(tools: Any, what: str) -> None:
    """Raises UserError that calls the value `what` unless it is a list of objects."""
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise UserError(f"{what} is of type {_kind(tools)}; give a list of function declarations")
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, Mapping):
            raise UserError(f"{what}: number {number} is of type {_kind(tool)}; give an object")


def one_of(what: str, value: Any, known: Sequence[str]) -> None:
    """Raises UserError unless the value is one of the known ones."""
    if value not in known:
        raise UserError(f"{what} is {value!r}; use {', '.join(known[:-1])} or {known[-1]}")


def _json(value: Any, what: str, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{what}: no JSON value ({error})") from None


def _checked(number: int, message: Any) -> tuple[str, Mapping[str, Any]]:
    """The message's place in words, and the message, which has a role."""
    place = f"message {number}"
    if not isinstance(message, Mapping):
        raise UserError(
            f"{place} is of type {_kind(message)}; give an object with role and content"
        )
    if not _text(message, "role", place):
        raise UserError(f"{place} has no role; use {', '.join(ROLES)}")
    return f"{place} ({message['role']})", message


def _turn(item: tuple[str, Mapping[str, Any]]) -> Turn:
    """A message that is no tool result."""
    place, message = item
    role = message["role"]
    if role == "system" and message.get("tools"):
        check_tools(message["tools"], f"{place} tools")
        return Turn(place=place, role=role, tools=message["tools"])
    if role not in ROLES:
        return Turn(place=place, role=role)
    turn = Turn(place=place, role=role, content=_content(message, place))
    if role != "assistant":
        return replace(turn, name=_text(message, "name", place))
    reasoning = _text(message, "reasoning_content", place) or _text(message, "reasoning", place)
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserError(f"{place}: tool_calls is of type {_kind(calls)}; give a list of calls")
    return replace(
        turn,
        reasoning=reasoning if reasoning.strip() else "",
        calls=tuple(_call(call, f"{place} call {i}") for i, call in enumerate(calls, 1)),
    )


def _results(
    run: list[tuple[str, Mapping[str, Any]]], calls: tuple[Call, ...], before: int
) -> Iterator[Turn]:
    """Consecutive tool results, `before` others having come since the assistant's message."""
    answered = [_answered(message, calls) for _, message in run]
    matched = len(calls) not in answered
    if matched:
        order = sorted(range(len(run)), key=answered.__getitem__)
        run, answered = [run[i] for i in order], [answered[i] for i in order]
    for offset, (place, message) in enumerate(run):
        index = before + offset + 1
        name = "" if matched else _text(message, "tool", place) or _text(message, "name", place)
        if not name:
            position = answered[offset] if matched else index - 1
            if position >= len(calls):
                raise UserError(
                    f"{place} names no tool and answers no call of the assistant before; give it"
                    " the tool_call_id of a call, or a name"
                )
            name = calls[position].name
        content = _content(message, place)
        yield Turn(place=place, role="tool", content=content, tool=name, index=index)


def _answered(message: Mapping[str, Any], calls: tuple[Call, ...]) -> int:
    """Position of the first call with the result's id; their number if there is none."""
    id = _id(message, "tool_call_id", "id")
    found = (i for i, call in enumerate(calls) if id is not None and call.id == id)
    return next(found, len(calls))


def _call(call: Any, place: str) -> Call:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f'{place} is {call!r}; give {{"function": {{"name", "arguments"}}}}')
    name = _text(function, "name", place)
    if not name:
        raise UserError(f"{place} has no name; name the tool")
    arguments, broken = function.get("arguments"), None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            arguments, broken = None, arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise UserError(f"{place}: arguments are of type {_kind(arguments)}; give an object")
    typed = {}
    for key, value in arguments.items():
        if not isinstance(key, str):
            raise UserError(
                f"{place}: argument {key!r} is named by a value of type {_kind(key)}; use a string"
            )
        typed[key] = _argument(value, f"{place} argument {key!r}")
    return Call(_id(call, "id"), name, typed, broken)


def _argument(value: Any, what: str) -> Argument:
    if isinstance(value, str):
        return Argument("string", value)
    return Argument(_kind(value), _json(value, what))


def _kind(value: Any) -> str:
    """The JSON type of a value (booleans before numbers: True is an int), or its Python type."""
    kinds = {
        "null": type(None),
        "boolean": bool,
        "number": int | float,
        "string": str,
        "object": dict,
        "array": list | tuple,
    }
    found = (kind for kind, python in kinds.items() if isinstance(value, python))
    return next(found, type(value).__name__)


def _id(message: Mapping[str, Any], *keys: str) -> str | None:
    """The first of the keys that is there, as text; ids may be numbers."""
    found = (str(message[key]) for key in keys if message.get(key) is not None)
    return next(found, None)


def _text(message: Mapping[str, Any], key: str, place: str) -> str:
    """A field that is a string, "" where it is missing or None."""
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} is of type {_kind(value)}; give a string")
    return value


def _content(message: Mapping[str, Any], place: str) -> list[str | None]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UserError(
            f"{place}: content is of type {_kind(content)}; give a string or a list of parts"
        )
    parts: list[str | None] = []
    for part in content:
        if not isinstance(part, Mapping):
            raise UserError(f"{place}: a part of content is of type {_kind(part)}; give objects")
        if part.get("type") in IMAGE_PARTS:
            parts.append(None)
        elif "text" in part:
            parts.append(_text(part, "text", place))
        else:
            raise UserError(f"{place}: a part of type {part.get('type')!r} has no text; give one")
    return parts
