"""What messages become before they are written, and what is said about bad ones."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.chat import IMAGE_PLACEHOLDER, ChatOptions, chat_segments
from k3jax.errors import UserError
from tests.data.chat_cases import CAT, RAW, TWO, calling, message, result, tag, text_of

# ---- arguments


@pytest.mark.parametrize(
    "value, kind, text",
    [
        ("", "string", ""),
        ("\n", "string", "\n"),
        ("3", "string", "3"),
        (True, "boolean", "true"),
        (1, "number", "1"),
        (1.5, "number", "1.5"),
        (None, "null", "null"),
        ({"b": [1, 2], "a": "é"}, "object", '{"b": [1, 2], "a": "é"}'),
        ([], "array", "[]"),
    ],
)
def test_types_of_arguments(value, kind, text):
    expected = tag("argument", text, key="k", type=kind)
    for arguments in ({"k": value}, json.dumps({"k": value})):
        turn = calling(("1", "f", arguments))
        assert expected in text_of(turn)


@pytest.mark.parametrize("arguments", [None, "", " \n", {}, "{}"])
def test_no_arguments(arguments):
    call = tag("call", tool="f&amp;&quot;", index="1")
    body = tag("response") + tag("tools", call)
    assert text_of(calling(("1", 'f&"', arguments))) == message(body, role="assistant")
    flat = {"role": "assistant", "tool_calls": [{"name": 'f&"', "arguments": arguments}]}
    assert text_of(flat) == message(body, role="assistant")


def test_order_of_arguments_is_kept():
    text = text_of(calling(("1", "f", '{"z": 1, "a&\\"": 2}')))
    assert text.index('key="z"') < text.index('key="a&amp;&quot;"')


@pytest.mark.parametrize("raw", ["{", "nan?", "[" * 100_000, "{'a': 1}", " <|close|>json<|sep|>"])
def test_arguments_that_are_no_json(raw):
    call = tag("call", tag("json", raw, type="object"), tool="f", index="1")
    body = tag("response") + tag("tools", call)
    assert text_of(calling(("1", "f", raw))) == message(body, role="assistant")


# ---- tool results


def results_of(*messages):
    """Tool, index and content of each result that is written."""
    segments = [segment.text for segment in chat_segments(messages, RAW)]
    found = [i for i, text in enumerate(segments) if text == " tool" and segments[i - 4] == " role"]
    return [(segments[i + 2], segments[i + 6], segments[i + 9]) for i in found]


def test_results_come_in_the_order_of_the_calls():
    run = [result("2", tool_call_id="y", name="stale"), result("1", id="x", tool="wrong")]
    expected = [("first", "1", "1"), ("second", "2", "2")]
    assert results_of(TWO, *run) == expected
    assert results_of(TWO, *reversed(run)) == expected


def test_results_of_which_one_matches_no_call_stay_in_order():
    run = [result("2", tool_call_id="y", tool="t", name="n"), result("?", tool_call_id="z")]
    assert results_of(TWO, *run) == [("t", "1", "2"), ("second", "2", "?")]
    run = [result("2", name="n"), result("1", tool_call_id="x")]
    assert results_of(TWO, *run) == [("n", "1", "2"), ("second", "2", "1")]


def test_results_are_counted_since_the_last_assistant_message():
    user = {"role": "user", "content": "u"}
    parts = [result("a", tool_call_id="y"), user, result("b", tool_call_id="x")]
    assert results_of(TWO, *parts) == [("second", "1", "a"), ("first", "2", "b")]
    again = [result("c", tool_call_id="x")]
    assert results_of(TWO, *parts, TWO, *again)[2:] == [("first", "1", "c")]


def test_two_results_of_one_call_and_calls_with_one_id():
    run = [
        result("2", tool_call_id="y"),
        result("1a", tool_call_id="x"),
        result("1b", tool_call_id="x"),
    ]
    assert [r[0::2] for r in results_of(TWO, *run)] == [
        ("first", "1a"),
        ("first", "1b"),
        ("second", "2"),
    ]
    same = calling((7, "first", None), (7, "second", None))
    assert results_of(same, result("r", tool_call_id=7)) == [("first", "1", "r")]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(order=st.permutations(range(5)))
def test_any_order_of_results_is_the_same_conversation(order):
    turn = calling(*((f"id{i}", f"tool{i}", None) for i in range(5)))
    run = [result(f"r{i}", tool_call_id=f"id{i}") for i in order]
    assert results_of(turn, *run) == [(f"tool{i}", str(i + 1), f"r{i}") for i in range(5)]


# ---- content


def test_content_in_parts_and_skipped_roles():
    parts = [{"type": "text", "text": "a"}, {"type": "note", "text": "b"}, {"text": ""}]
    other = {"role": "developer", "content": 5}
    assert text_of({"role": "user", "content": parts}, other) == message("ab", role="user")
    assert text_of({"role": "assistant", "content": parts, "name": "n"}) == message(
        tag("response", "ab"), role="assistant"
    )


# ---- bad input

BAD = [
    ("hello", "messages is of type string"),
    ({"role": "user"}, "messages is of type object"),
    (["hello"], "message 1 is of type string"),
    ([{"content": "x"}], "message 1 has no role"),
    ([{"role": "user"}, {"role": 5}], "message 2: role is of type number"),
    ([{"role": "user", "content": 5}], r"message 1 \(user\): content is of type number"),
    ([{"role": "user", "content": ["x"]}], "a part of content is of type string"),
    ([{"role": "user", "content": [{"type": "audio"}]}], "a part of type 'audio' has no text"),
    ([{"role": "user", "content": [{"text": 5}]}], "text is of type number"),
    ([{"role": "user", "name": ["x"]}], "name is of type array"),
    ([{"role": "assistant", "reasoning_content": 5}], "reasoning_content is of type number"),
    ([{"role": "assistant", "tool_calls": "f"}], "tool_calls is of type string"),
    ([{"role": "assistant", "tool_calls": ["f"]}], r"\(assistant\) call 1 is 'f'"),
    ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "call 1 is"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "call 1 has no name"),
    ([calling(("1", "f", "[1]"))], "call 1: arguments are of type array; give an object"),
    ([calling(("1", "f", "3"))], "arguments are of type number"),
    ([calling(("1", "f", 3))], "arguments are of type number"),
    ([calling(("1", "f", {1: 2}))], "argument 1 is named by a value of type number"),
    ([calling(("1", "f", {"k": {1, 2}}))], "argument 'k': no JSON value"),
    ([calling(("1", "f", {"k": b"x"}))], "argument 'k': no JSON value"),
    ([{"role": "tool", "content": "x"}], r"message 1 \(tool\) names no tool"),
    ([TWO, *[{"role": "tool"}] * 3], r"message 4 \(tool\) names no tool and answers no call"),
    ([{"role": "system", "tools": [{"a": {1, 2}}]}], r"\(system\) tools: no JSON value"),
    ([{"role": "system", "tools": [{1, 2}]}], r"\(system\) tools: number 1 is of type set"),
    ([{"role": "system", "tools": 5}], r"\(system\) tools is of type number; give a list"),
    ([{"role": "system", "tools": {"a": 1}}], r"\(system\) tools is of type object"),
    ([calling(("1", "f", {"k": float("nan")}))], "argument 'k': no JSON value"),
]


@pytest.mark.parametrize("messages, words", BAD, ids=[words for _, words in BAD])
def test_bad_messages(messages, words):
    with pytest.raises(UserError, match=words) as caught:
        chat_segments(messages)
    assert "\n" not in str(caught.value)


BAD_OPTIONS = [
    ({"effort": "medium"}, "effort is 'medium'; use low, high or max"),
    ({"effort": None}, "effort is None"),
    ({"tool_choice": {"type": "function"}}, "tool_choice is .*; use auto, required or none"),
    ({"response_format": {"type": "xml"}}, "type of response_format is 'xml'"),
    ({"response_format": "json"}, "type of response_format is 'json'"),
    ({"response_format": {"type": "json_schema"}}, "json_schema None"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {1}}}}, "schema of"),
    ({"tools": [{"a": object()}]}, "tools: no JSON value"),
    ({"tools": [{"a": float("inf")}]}, "tools: no JSON value"),
    ({"tools": 5}, "tools is of type number; give a list"),
    ({"tools": None}, "tools is of type null"),
    ({"tools": "f"}, "tools is of type string"),
    ({"tools": {"name": "f"}}, "tools is of type object"),
    ({"tools": ["f"]}, "tools: number 1 is of type string; give an object"),
    ({"image_prompts": CAT}, "image_prompts is .*; give a list"),
]


@pytest.mark.parametrize("fields, words", BAD_OPTIONS, ids=[words for _, words in BAD_OPTIONS])
def test_bad_options(fields, words):
    with pytest.raises(UserError, match=words) as caught:
        ChatOptions(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "count, text", [(1, "a"), (0, IMAGE_PLACEHOLDER), (1, 2 * IMAGE_PLACEHOLDER)]
)
def test_as_many_image_prompts_as_images(count, text):
    with pytest.raises(UserError, match=rf"{count} image_prompts for {text.count('<')} images"):
        chat_segments([{"role": "user", "content": text}], ChatOptions(image_prompts=[CAT] * count))
