"""Conversations with the numbers that the released encoder gives for them, and a small tokenizer."""

from typing import Any, NamedTuple

from hypothesis import strategies as st

from k3jax.data.bpe_training import train_bpe, write_ranks
from k3jax.data.chat import CLOSE, END_OF_MESSAGE, OPEN, SEP, ChatOptions, chat_segments, render
from k3jax.data.text import load_corpus
from k3jax.data.tokenizer import load_tokenizer

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=max`."
)
CAT, DOG = (f"<|media_begin|>{animal}<|media_end|>" for animal in ("cat", "dog"))


class Vector(NamedTuple):
    messages: list[dict[str, Any]]
    options: ChatOptions
    segments: int
    segments_hash: int  # of each segment's length in bytes, plus 2**31 for control
    tokens: int
    tokens_hash: int  # of the ids of the released rank file
    controls: tuple[int, int, int, int]  # open, close, sep, end of message


def fnv(words) -> int:
    """FNV-1a, 64 bits, over 32-bit little-endian words."""
    value = 0xCBF29CE484222325
    for word in words:
        for byte in int(word).to_bytes(4, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


VECTORS = {
    "plain": Vector(
        [{"role": "user", "content": "Hello <|open|> & goodbye"}],
        ChatOptions(),
        *(38, 0x8D67F74027F3F8F4, 95, 0x14E384B37A03643F),
        (4, 2, 6, 2),
    ),
    "instruct with images": Vector(
        [
            {"role": "system", "name": 'ops&"x', "content": "Rules."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look: "},
                    {"type": "image_url", "image_url": {"url": "unused"}},
                    {"type": "text", "text": " then <|kimi_image_placeholder|>."},
                ],
            },
        ],
        ChatOptions(thinking=False, image_prompts=[CAT, DOG]),
        *(42, 0x35C43BB588FEECD9, 54, 0xFB1CC45919CB3313),
        (4, 2, 6, 2),
    ),
    "tools": Vector(
        [
            {
                "role": "assistant",
                "reasoning_content": "Check.",
                "content": "Calling.",
                "tool_calls": [
                    {"id": "b", "function": {"name": "beta", "arguments": '{"z":1,"a":"x"}'}},
                    {"id": "a", "function": {"name": "alpha", "arguments": "not valid <|open|>"}},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "name": "stale", "content": "alpha result"},
            {"role": "tool", "tool_call_id": "b", "tool": "wrong", "content": "beta result"},
        ],
        ChatOptions(
            effort="low",
            tools=[
                {
                    "type": "function",
                    "function": {
                        "description": "B tool",
                        "name": "beta",
                        "parameters": {"z": {"type": "number"}, "a": {"type": "string"}},
                    },
                },
                {
                    "function": {
                        "name": "alpha",
                        "description": "A tool",
                        "parameters": {"type": "object"},
                    },
                    "type": "function",
                },
            ],
        ),
        *(182, 0xB060B0CF4E2A9500, 316, 0x38E754CB40CDD010),
        (15, 13, 28, 5),
    ),
    "request options": Vector(
        [{"role": "user", "name": 'A&B"', "content": "Return JSON."}],
        ChatOptions(
            effort="high",
            tool_choice="required",
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "required": ["b", "a"],
                        "properties": {"b": {"type": "number"}, "a": {"type": "string"}},
                        "type": "object",
                    },
                },
            },
        ),
        *(74, 0xC65D123D688DD863, 223, 0x597461E6FFE68C32),
        (6, 4, 10, 4),
    ),
}


def small_tokenizer(folder):
    """1,024 ids learned from a few sentences and the words of the format."""
    data = folder / "data"
    data.mkdir()
    for number in range(4):
        words = [
            EFFORT,
            "Let me check. Sunny, 3 days: def f(x):\n    return x\r\n\t中文 Ωμέγα é 👩‍👩‍👧‍👦",
        ]
        words += [f"{tag} role tool index key type {number + i}" for i, tag in enumerate("abcdef")]
        words += [f"message number {number * i} from {chr(0x4E00 + 97 * i)}" for i in range(200)]
        (data / f"{number}.txt").write_text("\n".join(words))
    path = folder / "small.model"
    write_ranks(train_bpe(load_corpus(str(data)), 1024), path)
    return load_tokenizer(str(path))


def tag(name: str, body: str = "", /, **attributes: str) -> str:
    """One element as it is rendered."""
    head = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"{OPEN}{name}{head}{SEP}{body}{CLOSE}{name}{SEP}"


def message(body: str, /, **attributes: str) -> str:
    return tag("message", body, **attributes) + END_OF_MESSAGE


RAW = ChatOptions(thinking=False, generation_prefix=False)  # nothing but the messages


def text_of(*messages, options=RAW):
    return render(chat_segments(messages, options))


def calling(*calls, **fields):
    calls = [{"id": id, "function": {"name": n, "arguments": a}} for id, n, a in calls]
    return {"role": "assistant", "tool_calls": calls} | fields


def result(content, **fields):
    return {"role": "tool", "content": content} | fields


TWO = calling(("x", "first", None), ("y", "second", None))


def plain(text: str) -> str:
    """The text without anything that reads like a marker."""
    return text.replace("<|", "< |")


TEXT = st.one_of(
    st.text(max_size=20).map(plain),
    st.sampled_from(
        ["", "\n", "\r\n\t", "  ", '"quoted" & <b>', "&amp;&quot;", "3", "null", "漢字😀"]
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3)), max_size=3)
