"""Conversations to token ids: K3's chat format, XTML.

    message := <|open|>message role="R" ...<|sep|> body <|close|>message<|sep|><|end_of_msg|>

A conversation becomes a list of segments. *Control* segments (the four structural tokens, image
prompts) are tokenised with special names recognised, all others without: "<|open|>" typed by a
user is ordinary text and opens nothing. Each segment is tokenised on its own, so their borders
decide the ids; an attribute is four segments, as in the released encoder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from k3jax.data.chat_messages import (
    Call,
    Turn,
    check_tools,
    compact_json,
    conversation,
    one_of,
)
from k3jax.data.tokenizer import Tokenizer
from k3jax.errors import UserError

OPEN, CLOSE, SEP, END_OF_MESSAGE = STRUCTURAL = (
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
)
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
EFFORTS = ("low", "high", "max")

_FENCED = "```json\n{}\n```"
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n" + _FENCED
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n" + _FENCED
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the"
    " response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_INVOKED = "The system is invoked with `{}={}`.\n"
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional"
    " formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n" + _FENCED


class Segment(NamedTuple):
    """Text that is tokenised on its own.

    Attributes:
        text: never empty.
        control: whether names of special tokens in it become their ids.
        trained: whether the loss counts its tokens as targets.
    """

    text: str
    control: bool
    trained: bool = False


class EncodedChat(NamedTuple):
    """Ids of a conversation, and which of them the model is to learn to produce."""

    ids: Int[np.ndarray, " T"]  # int32
    trained: Bool[np.ndarray, " T"]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a request says besides its messages.

    Raises: UserError naming the value that K3 does not know.
    """

    thinking: bool = True  # False: instruct mode, no think element anywhere, no effort
    effort: Literal["low", "high", "max"] = "max"  # how much to think
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI-style function declarations
    tool_choice: Literal["auto", "required", "none"] = "auto"
    response_format: Mapping[str, Any] | None = None  # {"type": "json_object" | "json_schema"}
    image_prompts: Sequence[str] | None = None  # one per image, control text; None: no images
    generation_prefix: bool = True  # ends inside the answer that is to be generated

    def __post_init__(self):
        one_of("effort", self.effort, EFFORTS)
        one_of("tool_choice", self.tool_choice, ("auto", *_TOOL_CHOICE))
        if isinstance(self.image_prompts, str):
            raise UserError(f"image_prompts is {self.image_prompts!r}; give a list, one per image")
        _response_format(self.response_format)
        check_tools(self.tools, "tools")
        compact_json(self.tools, "tools")


def chat_segments(
    messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
) -> list[Segment]:
    """The conversation in XTML.

        tools? effort? message* tool-choice? response-format? generation-prefix?

    Args:
        messages: OpenAI-style: `role` user, system, assistant or tool (others are skipped);
            `content` a string, None or parts ({"type": "text" | "image_url" ...}); `name`;
            for the assistant `reasoning_content` (or `reasoning`) and `tool_calls`; for results
            `tool_call_id`, `tool` or `name`. A system message with `tools` declares more tools.
            All turns keep their reasoning.
        options: None for thinking with effort max.

    Raises: UserError, one line, that names the message and what is wrong with it.
    """
    options = options or ChatOptions()
    out = _Writer(options.image_prompts)
    if options.tools:
        out.system("tool-declare", _TOOLS.format(compact_json(options.tools, "tools")))
    if options.thinking:
        out.system("thinking-effort", _EFFORT.format(options.effort))
    for turn in conversation(messages):
        _message(out, turn, options.thinking)
    if options.tool_choice != "auto":
        order = _INVOKED.format("tool_choice", options.tool_choice)
        out.system("tool-choice", order + _TOOL_CHOICE[options.tool_choice])
    if (order := _response_format(options.response_format)) is not None:
        out.system("response-format", order)
    if options.generation_prefix:
        out.open("message", role="assistant")
        out.open("think" if options.thinking else "response")
    out.check_images()
    return out.segments


def render(segments: Sequence[Segment]) -> str:
    """The text of all segments, for reading: it no longer tells control from text."""
    return "".join(segment.text for segment in segments)


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    options: ChatOptions | None = None,
) -> EncodedChat:
    """Ids of a conversation, and the loss mask.

    Trained on is what the assistant has to produce: everything after the opening tag that the
    generation prefix ends with, close tags and <|end_of_msg|> included. Not trained on are other
    messages, images, and arguments that were no JSON (the released model never learned those).
    `trained[t]` is about token t as a target; the loss of position t predicts token t + 1.

    Args: as for `chat_segments`. No begin or end of document is added.
    Raises: UserError for a bad conversation or a tokenizer without the structural tokens.
    """
    return encode_segments(chat_segments(messages, options), tokenizer)


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> EncodedChat:
    """Ids of segments, each tokenised on its own, and which of them are trained on."""
    missing = [name for name in STRUCTURAL if name not in tokenizer.specials]
    if missing:
        raise UserError(
            f"tokenizer {tokenizer.name!r} lacks {', '.join(missing)}, which chats are built of;"
            " use K3's tiktoken.model, or one made by `k3jax tokenizer`"
        )
    ids: list[int] = []
    trained: list[bool] = []
    for segment in segments:
        encode = tokenizer.encode_controls if segment.control else tokenizer.encode
        part = encode(segment.text)
        ids += part
        trained += [segment.trained] * len(part)
    return EncodedChat(np.array(ids, np.int32), np.array(trained, np.bool_))


class _Writer:
    """Collects segments; `trained` marks those that follow."""

    def __init__(self, image_prompts: Sequence[str] | None):
        self.segments: list[Segment] = []
        self.trained = False
        self._prompts = image_prompts
        self._images = 0

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False, self.trained))

    def control(self, text: str, trained: bool = True) -> None:
        if text:
            self.segments.append(Segment(text, True, self.trained and trained))

    def open(self, tag: str, **attributes: str) -> None:
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.control(END_OF_MESSAGE)

    def system(self, kind: str, body: str) -> None:
        """A message that the format itself adds."""
        self.open("message", role="system", type=kind)
        self.text(body.strip())
        self.end_message()

    def content(self, parts: Sequence[str | None]) -> None:
        """Texts and images (None), in which placeholders stand for images too."""
        for part in parts:
            if part is None:
                self._image()
            elif self._prompts is None:
                self.text(part)
            else:
                first, *others = part.split(IMAGE_PLACEHOLDER)
                self.text(first)
                for other in others:
                    self._image()
                    self.text(other)

    def _image(self) -> None:
        if self._prompts is None:
            self.text(IMAGE_PLACEHOLDER)
        elif self._images < len(self._prompts):
            self.control(self._prompts[self._images], trained=False)
        self._images += 1

    def check_images(self) -> None:
        if self._prompts is not None and self._images != len(self._prompts):
            raise UserError(
                f"{len(self._prompts)} image_prompts for {self._images} images and placeholders in"
                " the messages; give one for each"
            )


def _message(out: _Writer, turn: Turn, thinking: bool) -> None:
    if turn.tools:
        declared = compact_json(turn.tools, f"{turn.place} tools")
        return out.system("tool-declare", _MORE_TOOLS.format(declared))
    attributes = {"name": turn.name} if turn.name else {}
    if turn.role == "tool":
        attributes = {"tool": turn.tool, "index": str(turn.index)}
    out.open("message", role=turn.role, **attributes)
    if turn.role == "assistant":
        _answer(out, turn, thinking)
    else:
        out.content(turn.content)
    out.end_message()
    out.trained = False


def _answer(out: _Writer, turn: Turn, thinking: bool) -> None:
    """Trained on from the end of the generation prefix."""
    if thinking:
        out.open("think")
        out.trained = True
        out.content([turn.reasoning])
        out.close("think")
    out.open("response")
    out.trained = True
    out.content(turn.content)
    out.close("response")
    if turn.calls:
        out.open("tools")
        for index, call in enumerate(turn.calls, 1):
            _call(out, call, index)
        out.close("tools")


def _call(out: _Writer, call: Call, index: int) -> None:
    out.open("call", tool=call.name, index=str(index))
    for key, (kind, text) in call.arguments.items():
        out.open("argument", key=key, type=kind)
        out.content([text])
        out.close("argument")
    if call.broken is not None:
        out.trained = False
        out.open("json", type="object")
        out.content([call.broken])
        out.close("json")
        out.trained = True
    out.close("call")


def _response_format(asked: Mapping[str, Any] | None) -> str | None:
    """What the model is told about the form of its response."""
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, Mapping) else asked
    one_of("type of response_format", kind, ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    told = _INVOKED.format("response_format", kind) + _RAW_JSON
    if kind == "json_object":
        return told
    given = asked.get("json_schema")
    if not isinstance(given, Mapping):
        raise UserError(
            f"response_format has json_schema {given!r}; give {{'schema': ...}} or the schema itself"
        )
    schema = given.get("schema", given.get("json_schema", given))
    return told + _SCHEMA.format(compact_json(schema, "schema of response_format"))
