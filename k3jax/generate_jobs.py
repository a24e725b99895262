"""Many requests from a file of JSON lines to another, which a stopped process finds again."""

import fcntl
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax import hosts
from k3jax.data.chat import END_OF_MESSAGE, ChatOptions, encode_chat
from k3jax.data.chat_parser import parse
from k3jax.data.tokenizer import Tokenizer, digest
from k3jax.display import Served
from k3jax.errors import UserError, disk_errors
from k3jax.generate import Engine
from k3jax.request import Request, Result
from k3jax.run_dir import write_whole
from k3jax.sample import SamplingConfig

NUMBERS = {
    "max_tokens": int,
    "seed": int,
    "top_k": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}
CHAT = ("thinking", "effort", "tools", "tool_choice", "response_format")  # of `ChatOptions`
RESULT = ("id", "text", "tokens", "finish_reason", "request")  # fields of every line of an output
START = b'{"id": '  # of it
KNOWN = {"id", "prompt", "messages", "stop", *NUMBERS, *CHAT}


log = logging.getLogger("k3jax")


@dataclass(frozen=True)
class Job:
    """One line of the input."""

    place: str  # for messages: "jobs.jsonl line 3"
    id: str | int  # the line's own, or its number from 1
    fields: Mapping[str, Any]  # as given, checked one by one

    @property
    def thinks(self) -> bool:
        return bool(self.fields.get("thinking", True))


def read_jobs(path: str) -> list[Job]:
    """The lines of an input file, each known to be an object with good fields.

    Raises: UserError naming file, line, and what is wrong there.
    """
    jobs: list[Job] = []
    places: dict[str | int, str] = {}
    with disk_errors(f"input {path} not readable"):
        lines = Path(path).expanduser().read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        fields = _object(line, place)
        check_fields(fields, place)
        job = Job(place, fields.get("id", number), fields)
        if job.id in places:
            raise UserError(f"{place} has the id {job.id!r} of {places[job.id]}: ids must differ")
        places[job.id] = place
        jobs.append(job)
    if not jobs:
        raise UserError(
            f"input {path} has no lines: one JSON object per line, with prompt or messages"
        )
    return jobs


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{place} holds a {type(fields).__name__}, not an object")
    return fields


def check_fields(fields: dict[str, Any], place: str) -> None:
    """Raises UserError for a field that is unknown or of another type; `place` begins the message."""
    if unknown := sorted(fields.keys() - KNOWN):
        raise UserError(
            f"{place} has the field {unknown[0]!r}; known are {', '.join(sorted(KNOWN))}"
        )
    if ("prompt" in fields) == ("messages" in fields):
        raise UserError(f"{place} must have either prompt or messages")
    expected = {
        "prompt": (str, "text"),
        "messages": (list, "a list"),
        "thinking": (bool, "a boolean"),
    }
    for name, (kind, words) in expected.items():
        if name in fields and not isinstance(fields[name], kind):
            raise UserError(f"{place} has {name}={fields[name]!r}; expected {words}")
    given = fields.get("id", 0)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise UserError(f"{place} has id={given!r}; expected text or a whole number")
    for name, kind in NUMBERS.items():
        value = fields.get(name, 0)
        fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
        if isinstance(value, bool) or not fits or not -math.inf < value < math.inf:
            words = "a whole number" if kind is int else "a finite number"
            raise UserError(f"{place} has {name}={value!r}; expected {words}")
    stop = fields.get("stop", [])
    if not isinstance(stop, str) and not (
        isinstance(stop, list) and all(isinstance(part, str) for part in stop)
    ):
        raise UserError(f"{place} has stop={stop!r}; expected text or a list of texts")
    if "prompt" in fields and (chat := [name for name in CHAT if name in fields]):
        raise UserError(f"{place} has {chat[0]}, which goes with messages, and a prompt")


def chat_options(fields: Mapping[str, Any]) -> ChatOptions:
    """The options among the fields of a line or of a chat file."""
    return ChatOptions(**{name: fields[name] for name in CHAT if name in fields})


def make_request(
    fields: Mapping[str, Any], tokenizer: Tokenizer, defaults: Request, seed: int
) -> Request:
    """The request of a line.

    Args:
        fields: of the line.
        tokenizer: the model's.
        defaults: what the line does not say.
        seed: if the line has none.
    """
    stop_ids = defaults.stop_ids
    if "prompt" in fields:
        ids = [tokenizer.bos_id, *tokenizer.encode(fields["prompt"])]
    else:
        ids = encode_chat(fields["messages"], tokenizer, chat_options(fields)).ids.tolist()
        stop_ids = (*stop_ids, tokenizer.specials[END_OF_MESSAGE])
    stop = fields.get("stop", defaults.stop)
    known = defaults.sampling._asdict()
    return Request(
        prompt=ids,
        max_tokens=fields.get("max_tokens", defaults.max_tokens),
        sampling=SamplingConfig(**{name: fields.get(name, known[name]) for name in known}),
        seed=fields.get("seed", seed),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=stop_ids,
    )


def requests_of(jobs: list[Job], tokenizer: Tokenizer, defaults: Request) -> list[Request]:
    """The requests of all lines; the n-th without a seed draws with the default's plus n."""
    requests = []
    for n, job in enumerate(jobs):
        try:
            seed = (defaults.seed + n) % 2**32
            requests.append(make_request(job.fields, tokenizer, defaults, seed))
        except UserError as error:
            raise UserError(f"{job.place}: {error}") from error
    return requests


def check_requests(engine: Engine, jobs: list[Job], requests: list[Request]) -> None:
    """Raises UserError naming the line of a request that could not be served."""
    for job, request in zip(jobs, requests, strict=True):
        try:
            engine.check(request)
        except ValueError as error:
            raise UserError(f"{job.place}: {error}") from error


class Output:
    """The output file: a line is there, and stays, once its request is done.

    Lines come in the order in which requests finish; `sort` puts them in that of the input. Each says of
    which request it is, see `claim`. Of several processes the first writes.
    """

    def __init__(self, path: str, jobs: list[Job]):
        """Reads what an earlier process left. Raises UserError if that is no result of these jobs."""
        self.path = Path(path).expanduser()
        self._writes = hosts.index() == 0
        self._order = {job.id: n for n, job in enumerate(jobs)}
        self.lines: dict[str | int, bytes] = {}
        self._requests: dict[str | int, str] = {}
        self._content = b""
        with disk_errors(f"output {path} not readable"):
            if self.path.exists() and not self.path.is_file():
                raise UserError(f"output {path} is no file: choose another --output")
            if self.path.exists():
                self._content = self.path.read_bytes()
        self._whole = self._content.rfind(b"\n") + 1  # behind it: a line cut short by a kill
        for number, line in enumerate(self._content[: self._whole].split(b"\n")[:-1], 1):
            place = f"{path} line {number}"
            fields = _object(line, place)
            known = fields.get("id")
            if not isinstance(known, str | int) or known not in self._order:
                raise UserError(
                    f"{place} has the id {known!r}, which the input has not: choose another --output"
                )
            if missing := [name for name in RESULT if name not in fields]:
                raise UserError(
                    f"{place} has no {missing[0]}, so it is no result: choose another --output"
                )
            self.lines[known], self._requests[known] = line, fields["request"]
        rest = self._content[self._whole :]
        if rest[: len(START)] != START[: len(rest)]:
            raise UserError(
                f"output {path} ends in {rest[:40]!r}, which is no part of a result: choose another "
                "--output"
            )

    def claim(self, jobs: list[Job], requests: list[Request], model: str) -> None:
        """Names the requests, so that no result of an earlier one is taken for that of a changed one.

        Args:
            jobs, requests: of the same lines.
            model: what tells it from others.

        Raises: UserError if the file holds the result of another request or model.
        """
        for job, request in zip(jobs, requests, strict=True):
            name = digest(repr((model, request)).encode())[:16]
            if self._requests.setdefault(job.id, name) != name:
                raise UserError(
                    f"output {self.path} has for {job.place} (id {job.id!r}) the result of another "
                    "prompt, setting or model: choose another --output"
                )

    def __enter__(self) -> "Output":
        if self._writes:
            with disk_errors(f"output {self.path} cannot be written"):
                self._file = self.path.open("a+b")
                self._lock()
                self._file.truncate(self._whole)
        return self

    def _lock(self) -> None:
        """A lock of the operating system: it goes with the process, however that ends."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"output {self.path} is being written by another process: wait for it, or choose "
                "another --output"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("output %s cannot be locked (%s)", self.path, error)
        self._file.seek(0)  # another handle of the file would, when closed, give back the lock
        if self._file.read() != self._content:
            self._file.close()
            raise UserError(f"output {self.path} has changed meanwhile: start again")

    def __exit__(self, *_: Any) -> None:
        if self._writes:
            self._file.close()

    def add(self, job: Job, result: Result, *, logprobs: bool) -> None:
        """Appends a line and waits until it is on disk."""
        values: dict[str, Any] = {"id": job.id, "text": result.text}
        if "messages" in job.fields:
            mode = "think" if job.thinks else "response"
            values["message"] = parse(result.text, mode).to_dict()
        values |= {"tokens": result.tokens, "finish_reason": result.finish_reason}
        values["request"] = self._requests[job.id]
        if logprobs:
            values["logprobs"] = result.logprobs
        line = json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace")
        if self._writes:
            with disk_errors(f"output {self.path} cannot be written"):
                self._file.write(line + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
        self.lines[job.id] = line

    def sort(self) -> None:
        """Puts the lines in the order of the input; the file is never without one of them."""
        ordered = sorted(self.lines, key=self._order.__getitem__)
        if ordered != list(self.lines) and self._writes:
            with disk_errors(f"output {self.path} cannot be written"):
                write_whole(self.path, b"".join(self.lines[known] + b"\n" for known in ordered))


def run_jobs(
    engine: Engine, jobs: list[Job], requests: list[Request], output: Output, *, logprobs: bool
) -> None:
    """Serves the requests that are not in the output yet.

    Args:
        engine: with room for each of them.
        jobs, requests: of the same lines.
        output: where results go; has claimed the requests.
        logprobs: whether with log-probabilities.
    """
    todo = [n for n, job in enumerate(jobs) if job.id not in output.lines]
    with output, Served(done=len(jobs) - len(todo), total=len(jobs)) as progress:
        for event in engine.run(requests[n] for n in todo):
            if event.result is not None:
                output.add(jobs[todo[event.index]], event.result, logprobs=logprobs)
            progress.update(int(event.result is not None), engine.stats.generated)
        output.sort()
