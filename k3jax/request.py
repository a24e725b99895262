"""A request for text: what is asked, what comes back, and how its tokens become text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from k3jax.data.tokenizer import StreamDecoder
from k3jax.sample import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue."""

    prompt: Sequence[int]  # token ids, at least one
    max_tokens: int = 256  # to generate at most
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0  # of the draws; token t depends on (seed, t) and the text before it
    stop: tuple[str, ...] = ()  # the text ends before the first of them
    stop_ids: tuple[int, ...] = ()  # end it too, as the tokenizer's end of a document does


class Result(NamedTuple):
    """What became of a request."""

    tokens: list[int]  # generated, with the stop token, or all that a stop string spans
    logprobs: list[float]  # of each under the model's own distribution, see `sample_tokens`
    text: str  # without stop token and stop string
    finish_reason: str  # "stop", or "length" at max_tokens


class Event(NamedTuple):
    """News of one request."""

    index: int  # its place among the requests, from 0
    text: str  # what is new; what may become a stop string is held back
    tokens: list[int]  # new ones
    logprobs: list[float]  # of these
    result: Result | None  # with the last event


class TextStream:
    """Text of a request as its tokens come, up to the first stop string.

    What may be the beginning of one is not shown until it is clear; the parts of a character wait in
    the decoder. So a stop string is found wherever tokens and characters break it.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]):
        self._decoder, self._stop = decoder, stop
        self._longest = max(map(len, stop), default=0)
        self.text, self.stopped, self._shown = "", False, 0

    def push(self, token: int) -> None:
        self._add(self._decoder.push(token))

    def flush(self) -> None:
        """What is left of the characters after the last token."""
        self._add(self._decoder.flush())

    def _add(self, piece: str) -> None:
        if self.stopped:
            return
        start = max(0, len(self.text) + 1 - self._longest)
        self.text += piece
        cuts = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if cuts:
            self.text, self.stopped = self.text[: min(cuts)], True

    def take(self, *, last: bool = False) -> str:
        """Text not shown yet that is sure to stay; `last`: all."""
        end = len(self.text)
        if not last and not self.stopped:
            held = (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self.text.endswith(stop[:size])
            )
            end -= max(held, default=0)
        piece, self._shown = self.text[self._shown : end], max(end, self._shown)
        return piece


class Running:
    """A request in its slot."""

    def __init__(self, index: int, request: Request, pages: list[int], text: TextStream | None):
        self.index, self.request, self.pages, self.text = index, request, pages, text
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def take(self, tokens: list[int], logprobs: list[float], ended: bool, stops: set[int]) -> Event:
        """Adds what a block gave; the result is set if that was the end."""
        text, used, reason = self.text, 0, None
        for token in tokens:
            used += 1
            if token in stops:
                reason = "stop"
            elif text is not None:
                text.push(token)
                reason = "stop" if text.stopped else None
            if reason:
                break
        self.tokens += tokens[:used]
        self.logprobs += logprobs[:used]
        if reason is None and ended:
            reason = "length"
        if text is not None and reason:
            text.flush()
            reason = "stop" if text.stopped else reason
        piece = "" if text is None else text.take(last=reason is not None)
        result = None
        if reason:
            whole = "" if text is None else text.text
            result = Result(self.tokens, self.logprobs, whole, reason)
        return Event(self.index, piece, tokens[:used], logprobs[:used], result)


@dataclass
class Stats:
    """Work of an engine so far. Seconds leave out the first call of each program, which may compile
    it; `timed_*` are the tokens of the rest.
    """

    prompt: int = 0  # tokens of prompts that were read
    restored: int = 0  # and that a snapshot spared
    generated: int = 0  # tokens given to requests
    timed_prompt: int = 0
    timed_generated: int = 0
    prompt_seconds: float = 0.0
    generated_seconds: float = 0.0

    def rates(self) -> list[str]:
        """Tokens per second in words; what was not measured is left out."""
        shown = (
            ("prefill", self.timed_prompt, self.prompt_seconds),
            ("decode", self.timed_generated, self.generated_seconds),
        )
        rates = [f"{name} {n / seconds:,.0f} tokens/s" for name, n, seconds in shown if n]
        if self.restored:
            rates.append(f"{self.restored:,} tokens of prompts from snapshots")
        return rates
