"""The parser of model output: every rule, every cut, against a second, plainer implementation."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3jax.data.chat import (
    CLOSE,
    END_OF_MESSAGE,
    OPEN,
    SEP,
    ChatOptions,
    chat_segments,
    encode_chat,
)
from k3jax.data.chat import render as rendered
from k3jax.data.chat_parser import (
    ChatParser,
    ContentDelta,
    Message,
    ReasoningDelta,
    Retracted,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    parse,
)
from k3jax.data.tokenizer import ByteTokenizer
from tests.data.chat_cases import CALLS, TEXT, plain, small_tokenizer, tag

CLOSED = f"{CLOSE}think{SEP}"
END = f"{CLOSE}message{SEP}{END_OF_MESSAGE}"
MODES = ("think", "response")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("parser"))


def streamed(pieces, mode="think"):
    """Events of all pieces, and the message."""
    parser = ChatParser(mode)
    events = [event for piece in pieces for event in parser.push(piece)]
    last, message = parser.finish()
    return events + last, message


def joined(events):
    """Neighbouring deltas of one kind as one."""
    kinds = (ReasoningDelta, ContentDelta, ToolCallArguments)
    found = []
    for event in events:
        if found and type(event) is type(found[-1]) and isinstance(event, kinds):
            event = type(event)(**vars(event) | {"text": found.pop().text + event.text})
        found.append(event)
    return found


def told(events):
    """The message that somebody who only sees the events arrives at."""
    reasoning = content = ""
    names, arguments, ended = {}, {}, []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case Retracted():
                assert not content
                reasoning = ""
            case ToolCallStart(index, id, name):
                names[index] = id, name
            case ToolCallArguments(index, text):
                arguments[index] = arguments.get(index, "") + text
            case ToolCallEnd(index):
                ended.append(index)
    calls = (ToolCall(*names[index], json.loads(arguments[index])) for index in ended)
    return Message(reasoning, content, tuple(calls))


# ---- a second implementation, whole text only


def value_of(text, kind):
    try:
        value = text if kind == "string" else json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    except ValueError:
        return text


def attributes_of(head):
    pairs = re.findall(r'(?<!\w)(\w+)="([^"]*)"', head)
    return {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in pairs}


def reference(text, mode):
    text, ended, _ = text.partition(END_OF_MESSAGE)

    def cut(text):
        """Without a marker of a channel that the end of the text cuts off."""
        channels = ("think", "response", "tools", "message")
        at = max(text.rfind(OPEN), text.rfind(CLOSE))
        markers = [f"{mark}{channel}{SEP}" for mark in (OPEN, CLOSE) for channel in channels]
        partial = any(m != text[at:] and m.startswith(text[at:]) for m in markers)
        return text[:at] if partial and at >= 0 and not ended else text

    reasoning = ""
    if mode == "think":
        before, closed, after = text.partition(CLOSED)
        if closed:
            reasoning, text = before, after
        elif not re.search(r"(?:<\|open\|>|<\|close\|>)response<\|sep\|>", text):
            return Message(cut(text), "", ())
    content, calls, closed = "", [], True
    while True:
        before, opened, text = text.partition(f"{OPEN}tools{SEP}")
        wrappers = (
            r"<\|open\|>response<\|sep\|>|<\|close\|>response<\|sep\|>|<\|close\|>message<\|sep\|>"
        )
        content += re.sub(wrappers, "", before if opened else cut(before))
        if not opened:
            break
        section, closed, text = text.partition(f"{CLOSE}tools{SEP}")
        for head, body in re.findall(
            r"<\|open\|>call (.*?)<\|sep\|>(.*?)<\|close\|>call<\|sep\|>", section, re.S
        ):
            arguments = {}
            for about, value in re.findall(
                r"<\|open\|>argument (.*?)<\|sep\|>(.*?)<\|close\|>argument<\|sep\|>", body, re.S
            ):
                about = attributes_of(about)
                if "key" in about:
                    arguments[about["key"]] = value_of(value, about.get("type", "string"))
            if name := attributes_of(head).get("tool"):
                calls.append(ToolCall(name, name, arguments))
        if not closed:
            break
    return Message(reasoning, content, tuple(calls))


def without_ids(message):
    calls = (ToolCall(call.name, call.name, call.arguments) for call in message.tool_calls)
    return Message(message.reasoning, message.content, tuple(calls))


SOUP = st.lists(
    st.sampled_from(
        [
            *(OPEN, CLOSE, SEP, END_OF_MESSAGE, "<", "<|", "|>", "think", "response", "tools", "call"),
            *("message", "argument", "a", " ", "\n", "é", "[1]", '"', '="', "&quot;", "tool", "key"),
            *(f"{mark}{name}{SEP}" for mark in (OPEN, CLOSE) for name in
              ("think", "response", "tools", "message", "call", "argument", "json")),
            *(f"{OPEN}tools{SEP}", CLOSED, f"{CLOSE}call{SEP}", f"{CLOSE}argument{SEP}") * 3,
            *[f'{OPEN}call tool="f" index="1"{SEP}', f'{OPEN}call index="2"{SEP}'] * 3,
            *[f'{OPEN}argument key="k" type="number"{SEP}', f'{OPEN}argument key="s"{SEP}'] * 3,
        ]
    ),
    max_size=25,
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=1500)
@given(soup=SOUP, mode=st.sampled_from(MODES))
def test_any_text_is_read_as_the_rules_say(soup, mode):
    assert without_ids(parse("".join(soup), mode)) == reference("".join(soup), mode)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(soup=SOUP, mode=st.sampled_from(MODES), data=st.data())
def test_however_the_text_is_cut(soup, mode, data):
    text = "".join(soup)
    whole, message = streamed([text], mode)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for cut in (pieces, text):
        events, found = streamed(cut, mode)
        assert found == message
        assert joined(events) == joined(whole)
    assert told(whole) == message


@settings(deadline=None, derandomize=True, max_examples=100)
@given(soup=SOUP, mode=st.sampled_from(MODES))
def test_a_text_may_end_anywhere(soup, mode):
    """What was said before the end stands, and the events tell the message."""
    text = "".join(soup)
    for end in range(len(text)):
        parser = ChatParser(mode)
        said = parser.push(text[:end])
        last, message = parser.finish()
        assert told(said + last) == message
        later = joined(streamed([text[:end], text[end:]], mode)[0])
        sure = joined(said)[:-1]  # the last delta may go on
        assert later[: len(sure)] == sure


@settings(deadline=None, derandomize=True, max_examples=50)
@given(text=st.text(st.characters(), max_size=40), mode=st.sampled_from(MODES))
def test_ordinary_text_is_kept(text, mode):
    message = parse(plain(text), mode)
    assert message.reasoning + message.content == plain(text)


# ---- single rules


def test_an_answer_with_everything():
    call = tag("call", tag("argument", "Paris", key="city", type="string")
               + tag("argument", "3", key="days", type="number"), tool="get_weather", index="1")  # fmt: skip
    call += tag("call", tag("argument", "[1, 2]", key="o", type="array"), tool="s", index="2")
    text = "Why." + CLOSED + tag("response", "Because.") + tag("tools", call) + END + "ignored"
    parser = ChatParser()
    events = parser.push(text)
    assert parser.done
    assert parser.push("more") == []
    last, message = parser.finish()
    assert message == Message(
        "Why.",
        "Because.",
        (
            ToolCall("get_weather:1", "get_weather", {"city": "Paris", "days": 3}),
            ToolCall("s:2", "s", {"o": [1, 2]}),
        ),
    )
    assert last == []
    assert joined(events) == [
        ReasoningDelta("Why."),
        ContentDelta("Because."),
        ToolCallStart(0, "get_weather:1", "get_weather"),
        ToolCallArguments(0, '{"city": "Paris", "days": 3}'),
        ToolCallEnd(0),
        ToolCallStart(1, "s:2", "s"),
        ToolCallArguments(1, '{"o": [1, 2]}'),
        ToolCallEnd(1),
    ]


@pytest.mark.parametrize(
    "text, reasoning, content",
    [
        ("", "", ""),
        ("a", "a", ""),
        (CLOSED, "", ""),
        (f"a{CLOSED}", "a", ""),
        (f"a{CLOSED}b", "a", "b"),
        (f"a{CLOSED}{OPEN}response{SEP}b", "a", "b"),
        (f"a{CLOSED}{tag('response', 'b')}{END}", "a", "b"),
        (f"a{CLOSE}response{SEP}{END}", "", "a"),
        (f"a{OPEN}response{SEP}b", "", "ab"),
        (f"a{tag('response', 'b')}c{CLOSED}d", f"a{tag('response', 'b')}c", "d"),
        (f"a{tag('tools', 'b')}", f"a{tag('tools', 'b')}", ""),
        (f"a{OPEN}think{SEP}b{CLOSED}", f"a{OPEN}think{SEP}b", ""),
        (f"a{END_OF_MESSAGE}{CLOSED}b", "a", ""),
        (f"a{CLOSED}b{CLOSED}c", "a", f"b{CLOSED}c"),
    ],
)
def test_kf_087_starts_inside_think(text, reasoning, content):
    assert parse(text) == Message(reasoning, content)
    assert streamed(text)[1] == Message(reasoning, content)


def test_a_response_without_the_end_of_thinking_is_told_again():
    call = tag("tools", tag("call", tool="f", index="1"))
    events, message = streamed(["a", f"b{CLOSE}response{SEP}{call}{END}"])
    assert joined(events) == [
        ReasoningDelta(f"ab{CLOSE}response{SEP}{call}{CLOSE}message{SEP}"),
        Retracted(),
        ContentDelta("ab"),
        ToolCallStart(0, "f:1", "f"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
    ]
    assert message == told(events)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "end, kept",
    [
        *[(f"{mark}{name}", "") for mark in (OPEN, CLOSE) for name in
          ("", "t", "think", "response", "tools", "message", "message<", "tools<|sep|")],
        *[(text, text) for text in ("<", "<|", "<|op", "<|close|", "<|end_of_msg|", f"{OPEN}x")],
    ],
)  # fmt: skip
def test_a_marker_cut_off_at_the_end_is_dropped(end, kept, mode):
    for pieces in (["ab" + end], "ab" + end):
        message = streamed(pieces, mode)[1]
        assert message.reasoning + message.content == "ab" + kept


def test_what_may_become_a_marker_waits():
    parser = ChatParser("response")
    assert parser.push("a<|clo") == [ContentDelta("a")]
    assert parser.push("se|>resp") == []
    assert parser.push("ect") == [ContentDelta("<|close|>respect")]
    assert parser.push(f"<|close|>response{SEP}") == []


ARGUMENTS = [
    ('key="k" type="string"', "3", {"k": "3"}),
    ('key="k"', "3", {"k": "3"}),
    ('key="k" type="number"', "3", {"k": 3}),
    ('key="k" type="number"', "-1.5e3", {"k": -1500.0}),
    ('key="k" type="integer"', "3", {"k": 3}),
    ('key="k" type="boolean"', "true", {"k": True}),
    ('key="k" type="null"', "null", {"k": None}),
    ('key="k" type="object"', '{"a": [1]}', {"k": {"a": [1]}}),
    ('key="k" type="object"', "{broken", {"k": "{broken"}),
    ('key="k" type="number"', "NaN", {"k": "NaN"}),
    ('key="k" type="number"', "1e999", {"k": "1e999"}),
    ('key="k" type="number"', "1" * 5000, {"k": "1" * 5000}),
    ('key="k" type="array"', "[" * 100_000, {"k": "[" * 100_000}),
    ('key="a&amp;quot;&quot;" type="string"', "\n", {'a&quot;"': "\n"}),
    ('key=""', "", {"": ""}),
    ("type='string'", "x", {}),
    ("", "x", {}),
]


@pytest.mark.parametrize("head, text, expected", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_values_of_arguments(head, text, expected):
    argument = f"{OPEN}argument {head}{SEP}{text}{CLOSE}argument{SEP}"
    text = tag("tools", tag("call", argument, tool="f&amp;&quot;", index="1"))
    events, message = streamed([text], "response")
    assert message.tool_calls == (ToolCall('f&":1', 'f&"', expected),)
    assert told(events) == message


def test_incomplete_and_nameless_calls_are_dropped():
    good = tag("call", tool="f", index="1")
    nameless = tag("call", tag("argument", "x", key="k"), index="1")
    unclosed = f'{OPEN}call tool="g" index="2"{SEP}' + tag("argument", "x", key="k")
    for text in (good + unclosed, nameless + good, good + tag("call", "x") + unclosed, good + OPEN):
        for end in ("", f"{CLOSE}tools{SEP}{END}"):
            message = parse(f"{OPEN}tools{SEP}{text}{end}", "response")
            assert message == Message("", "", (ToolCall("f:1", "f", {}),))
    half = f'{OPEN}argument key="k"{SEP}x'
    message = parse(f'{OPEN}tools{SEP}{OPEN}call tool="f"{SEP}{half}{CLOSE}call{SEP}', "response")
    assert message.tool_calls == (ToolCall("f:1", "f", {}),)


def test_mode():
    with pytest.raises(ValueError, match="mode is 'tools'; use 'think' or 'response'"):
        ChatParser("tools")


# ---- from the encoder and back


@settings(deadline=None, derandomize=True, max_examples=200)
@given(reasoning=TEXT, content=TEXT, calls=CALLS, thinking=st.booleans(), whole=st.booleans())
@example('"', "&", [('f"&', {'k"&': "\n", "": {"a": [1, "é"]}})], True, True)
def test_encode_then_parse(tokenizer, reasoning, content, calls, thinking, whole):
    """What the loss trains on reads back as the message it was made of, text or ids."""
    message = Message(
        reasoning if thinking and reasoning.strip() else "",
        content,
        tuple(ToolCall(f"{n}:{i}", n, a) for i, (n, a) in enumerate(calls, 1)),
    )
    options = ChatOptions(thinking=thinking)
    encoded = encode_chat([message.to_dict()], tokenizer, options)
    ids = encoded.ids[encoded.trained]
    segments = chat_segments([message.to_dict()], options)
    text = rendered([segment for segment in segments if segment.trained])
    assert tokenizer.decode(ids) == text
    mode = "think" if thinking else "response"
    stream = tokenizer.stream()
    pieces = [text] if whole else [*(stream.push(int(i)) for i in ids), stream.flush()]
    assert streamed(pieces, mode)[1] == message


def test_bytes_cut_inside_characters():
    text = f"漢😀{CLOSED}é"
    stream = ByteTokenizer().stream()
    pieces = [stream.push(byte) for byte in text.encode()[:-1]] + [stream.flush()]
    assert streamed(pieces)[1] == Message("漢😀", "\ufffd")


@pytest.mark.parametrize(
    "start, unit",
    [
        ("", "a"),
        ("", "<"),
        ("", CLOSE),
        ("", f"{OPEN}response"),
        (f"{CLOSED}{OPEN}tools{SEP}", OPEN),
        (f'{CLOSED}{OPEN}tools{SEP}{OPEN}call tool="', "="),
        (f'{CLOSED}{OPEN}tools{SEP}{OPEN}call tool="f"{SEP}{OPEN}argument key="k"{SEP}', CLOSE),
    ],
)
def test_only_the_beginning_of_a_marker_is_kept_back(start, unit):
    """Of 200,000 characters, pushed one at a time, none is looked at again after a marker's length."""
    parser = ChatParser()
    parser.push(start)
    longest = 0
    for character in unit * (200_000 // len(unit)):
        parser.push(character)
        longest = max(longest, len(parser._waiting))
    assert longest < len(f"{CLOSE}response{SEP}")
    parser.finish()
