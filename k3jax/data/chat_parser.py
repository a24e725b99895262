"""What the model writes in K3's chat format, taken apart while it is being written.

The prompt ends inside `think` (or `response`), so the text starts there:

    reasoning <|close|>think<|sep|>
    <|open|>response<|sep|> content <|close|>response<|sep|>
    <|open|>tools<|sep|> calls <|close|>tools<|sep|> <|close|>message<|sep|> <|end_of_msg|>

Each state of the parser knows a few markers; what lies between them is text of that state. Text
that may yet become a marker waits. Nothing is searched twice, so the time is linear in the length.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.data.chat import CLOSE, END_OF_MESSAGE, OPEN, SEP

CHANNELS = ("think", "response", "tools", "message")

_OPEN_TOOLS, _OPEN_RESPONSE = f"{OPEN}tools{SEP}", f"{OPEN}response{SEP}"
_OPEN_CALL, _OPEN_ARGUMENT = f"{OPEN}call ", f"{OPEN}argument "  # attributes follow
_CLOSE_THINK, _CLOSE_RESPONSE = f"{CLOSE}think{SEP}", f"{CLOSE}response{SEP}"
_CLOSE_MESSAGE, _CLOSE_TOOLS = f"{CLOSE}message{SEP}", f"{CLOSE}tools{SEP}"
_CLOSE_CALL, _CLOSE_ARGUMENT = f"{CLOSE}call{SEP}", f"{CLOSE}argument{SEP}"
_CHANNEL_MARKERS = [f"{mark}{channel}{SEP}" for mark in (OPEN, CLOSE) for channel in CHANNELS]

# By state: where a marker leads. Any other marker of a channel is text in think and response.
_NEXT = {
    "think": {_CLOSE_THINK: "response"},
    "response": {
        _OPEN_RESPONSE: "response",
        _CLOSE_RESPONSE: "response",
        _CLOSE_MESSAGE: "response",
        _OPEN_TOOLS: "tools",
    },
    "tools": {_OPEN_CALL: "call tag", _CLOSE_TOOLS: "response"},
    "call tag": {SEP: "call", _CLOSE_TOOLS: "response"},
    "call": {_OPEN_ARGUMENT: "argument tag", _CLOSE_CALL: "tools", _CLOSE_TOOLS: "response"},
    "argument tag": {SEP: "argument", _CLOSE_CALL: "tools", _CLOSE_TOOLS: "response"},
    "argument": {_CLOSE_ARGUMENT: "call", _CLOSE_CALL: "tools", _CLOSE_TOOLS: "response"},
}
_MARKERS = {
    state: {*after, END_OF_MESSAGE, *(_CHANNEL_MARKERS if state in ("think", "response") else ())}
    for state, after in _NEXT.items()
}
_PATTERNS = {
    state: re.compile("|".join(map(re.escape, sorted(markers))))
    for state, markers in _MARKERS.items()
}
_BEGINNINGS = {
    state: frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
    for state, markers in _MARKERS.items()
}
_LONGEST = max(len(marker) for markers in _MARKERS.values() for marker in markers)

_ATTRIBUTE = re.compile(r'\b(\w++)="([^"]*)"')


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the response."""

    text: str


@dataclass(frozen=True)
class Retracted:
    """Thinking was never closed but the response was: all reasoning so far was content.

    Comes at the end of the message; the events that follow tell all of it again.
    """


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; it counts once its `ToolCallEnd` has come."""

    index: int  # from 0
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments; the parts, joined, are one JSON object in ASCII."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """A call is complete."""

    index: int


Event = ReasoningDelta | ContentDelta | Retracted | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(frozen=True)
class ToolCall:
    """A complete call: `id` is "name:number", numbers count from 1."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """All that the model answered."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """An OpenAI-style assistant message, as `chat_segments` takes it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class ChatParser:
    """Takes text in pieces cut anywhere and gives events; any text is accepted.

    Decode with special names kept (`Tokenizer.stream` does). However the text is cut, joined deltas
    and the message are the same.

    Attributes:
        done: <|end_of_msg|> has come; the rest of the text is ignored.
    """

    def __init__(self, mode: Literal["think", "response"] = "think"):
        """Args: mode: the element that the prompt left open."""
        if mode not in ("think", "response"):
            raise ValueError(f"mode is {mode!r}; use 'think' or 'response'")
        self.done = False
        self._state = mode
        self._waiting = ""  # may be the beginning of a marker
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._responded = False  # a marker of `response` came while thinking was open
        self._parts: list[str] = []  # of the attributes or the value being read
        self._started = 0  # calls with a name
        self._call: ToolCall | None = None  # being read; None: a call that does not count
        self._argument: tuple[str | None, str] = (None, "string")  # being read: key and type

    def push(self, text: str) -> list[Event]:
        """What became certain with these characters."""
        text, at = self._waiting + text, 0
        while not self.done and (found := _PATTERNS[self._state].search(text, at)):
            self._take(text[at : found.start()])
            at = found.end()
            self._meet(found[0])
        end = at if self.done else _certain(text, at, _BEGINNINGS[self._state])
        self._take(text[at:end])
        self._waiting = "" if self.done else text[end:]
        return self._handed_out()

    def finish(self) -> tuple[list[Event], Message]:
        """The last events and the whole message; call it once, when no more text comes.

        A marker cut off at the end is dropped, and so is a call without its end.
        """
        if self._responded:
            return self._told_again()
        if not self._waiting.startswith((OPEN, CLOSE)):
            self._take(self._waiting)
        self.done, self._waiting = True, ""
        message = Message("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        return self._handed_out(), message

    def _told_again(self) -> tuple[list[Event], Message]:
        """Everything once more as content: thinking was never closed, but a response was given."""
        self.done = True
        parser = ChatParser("response")
        events = parser.push("".join(self._reasoning) + self._waiting)
        last, message = parser.finish()
        return [Retracted(), *events, *last], message

    def _handed_out(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, text: str) -> None:
        """Text of the present state; between calls and between arguments there is none."""
        if not text:
            return
        if self._state == "think":
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
        elif self._state == "response":
            self._content.append(text)
            self._events.append(ContentDelta(text))
        elif self._state in ("call tag", "argument tag", "argument"):
            self._parts.append(text)

    def _meet(self, marker: str) -> None:
        """Goes from the present state to the one that the marker leads to."""
        before, after = self._state, _NEXT[self._state].get(marker)
        if marker == END_OF_MESSAGE:
            self.done = True
        elif after is None:  # a marker that means nothing here
            self._responded |= marker in (_OPEN_RESPONSE, _CLOSE_RESPONSE)
            self._take(marker)
        else:
            self._state = after
        if marker == SEP:
            self._begin_call() if before == "call tag" else self._begin_argument()
        elif marker == _CLOSE_ARGUMENT:
            self._end_argument()
        elif marker == _CLOSE_CALL:
            self._end_call()
        elif marker == _CLOSE_THINK and before == "think":
            self._responded = False
        if after != before:
            self._parts = []

    def _begin_call(self) -> None:
        name = _attributes(self._parts).get("tool")
        self._call = None
        if name:
            self._started += 1
            self._call = ToolCall(f"{name}:{self._started}", name, {})
            self._events.append(ToolCallStart(self._started - 1, self._call.id, name))

    def _begin_argument(self) -> None:
        attributes = _attributes(self._parts)
        self._argument = attributes.get("key"), attributes.get("type", "string")

    def _end_argument(self) -> None:
        key, kind = self._argument
        if self._call is None or key is None:
            return
        value, text = _value("".join(self._parts), kind)
        before = ", " if self._call.arguments else "{"
        self._call.arguments[key] = value
        self._more_arguments(f"{before}{json.dumps(key)}: {text}")

    def _end_call(self) -> None:
        if self._call is None:
            return
        self._more_arguments("}" if self._call.arguments else "{}")
        self._events.append(ToolCallEnd(self._started - 1))
        self._calls.append(self._call)

    def _more_arguments(self, text: str) -> None:
        self._events.append(ToolCallArguments(self._started - 1, text))


def parse(text: str, mode: Literal["think", "response"] = "think") -> Message:
    """The message in a whole text; never raises, whatever the text.

    Args:
        text: decoded with special names kept; starts inside the element that the prompt opened.
        mode: that element.
    """
    parser = ChatParser(mode)
    parser.push(text)
    return parser.finish()[1]


def _certain(text: str, at: int, beginnings: frozenset[str]) -> int:
    """Where the longest end of `text[at:]` starts that may become a marker."""
    start = max(at, len(text) - _LONGEST)
    while (start := text.find("<", start)) >= 0:
        if text[start:] in beginnings:
            return start
        start += 1
    return len(text)


def _attributes(parts: list[str]) -> dict[str, str]:
    found = _ATTRIBUTE.findall("".join(parts))
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


def _value(text: str, kind: str) -> tuple[Any, str]:
    """An argument's value, and the same as JSON; what is no JSON is a string."""
    if kind != "string":
        try:
            value = json.loads(text)
            return value, json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return text, json.dumps(text)
