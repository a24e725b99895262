"""`k3jax generate`: text from a trained or imported model, for one prompt, one chat or many requests."""

import contextlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3jax.errors import UserError, disk_errors
from k3jax.sharding.mesh_config import MeshConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

    from k3jax.data.tokenizer import Tokenizer
    from k3jax.generate import Engine
    from k3jax.request import Event, Request
    from k3jax.run_dir import Trained


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    prompt: str | None = None  # text to continue
    chat: str | None = None  # JSON file: a list of messages, or an object as in --input
    input: str | None = None  # JSON lines: prompt or messages, an id, and any of the values below
    output: str | None = None  # JSON lines of results; requests that are in it are not done again
    max_tokens: int = 256  # tokens to add at most
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0: all
    top_p: float = 1.0  # and among the fewest whose probabilities reach this sum
    min_p: float = 0.0  # and among those with this share of the likeliest's probability
    repetition_penalty: float = 1.0  # above 1: tokens already there become less likely
    seed: int = 0  # of the draws; request n of a file has seed + n
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    slots: int = 8  # requests of a file that are generated together
    max_len: int | None = None  # tokens of a request, prompt included; None: what the longest needs
    # States of past prompts kept, at multiples of 512 tokens, for requests that begin alike; 0: none
    snapshots: int = 0
    logprobs: bool = False  # also the log-probability of each token
    tokenizer: str | None = None  # "bytes", or a vocabulary's file or folder; None: the model's own
    step: int | None = None  # checkpoint to use; None: the newest
    # Devices that share the model, also those of several processes; all 1: one device
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=1))
    platform: str | None = None  # cpu, cuda or tpu: insist on it; None: what JAX finds


def check_args(asked: GenerateArgs) -> None:
    """Raises UserError for flags that do not go together; loads no JAX."""
    if [asked.prompt, asked.chat, asked.input].count(None) != 2:
        raise UserError("what to generate? give one of --prompt TEXT, --chat FILE, --input FILE")
    if (asked.input is None) != (asked.output is None):
        raise UserError("--input and --output go together: JSON lines in and out")
    for name in ("max_tokens", "slots"):
        if getattr(asked, name) < 1:
            raise UserError(f"{name} is {getattr(asked, name)}; it must be at least 1")
    if asked.snapshots < 0:
        raise UserError(f"snapshots is {asked.snapshots}; it must be at least 0 (0: none)")
    if not 0 <= asked.seed < 2**32:
        raise UserError(f"seed is {asked.seed}; it must be at least 0 and below 2**32")
    if "" in asked.stop:
        raise UserError("--stop has an empty text; give at least one character")


def generate(asked: GenerateArgs, model_dir: str) -> int:
    """The command; returns the exit code. Files with requests are read before the model is loaded.

    Of several processes, which share the model, the first speaks and writes.
    """
    from k3jax import hosts
    from k3jax.data.tokenizer import MODELS_OWN, check_vocabulary, load_tokenizer
    from k3jax.request import Request
    from k3jax.run_dir import load_trained
    from k3jax.sample import SamplingConfig
    from k3jax.sharding.mesh import mesh_of_several

    defaults = Request(
        prompt=(),
        max_tokens=asked.max_tokens,
        sampling=SamplingConfig(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
        ),
        seed=asked.seed,
        stop=asked.stop,
    )
    try:
        defaults.sampling.check()
        mesh = mesh_of_several(asked.mesh)
    except ValueError as error:
        raise UserError(str(error)) from error

    def loaded() -> "tuple[Trained, Tokenizer]":
        try:
            trained = load_trained(model_dir, step=asked.step, mesh=mesh)
        except UserError:
            raise
        except ValueError as error:  # a mesh over which the model does not divide
            raise UserError(str(error)) from error
        tokenizer = load_tokenizer(asked.tokenizer or trained.cfg.tokenizer)
        check_vocabulary(tokenizer, trained.cfg.model.vocab_size, fix=MODELS_OWN)
        return trained, tokenizer

    run = _continue if asked.prompt is not None else _chat if asked.chat is not None else _many
    with contextlib.ExitStack() as quiet:
        if hosts.index() > 0:
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        return run(asked, loaded, defaults, mesh)


def _engine(
    asked: GenerateArgs,
    trained: "Trained",
    tokenizer: "Tokenizer",
    requests: "list[Request]",
    mesh: "Mesh | None",
) -> "Engine":
    """An engine with room for these requests: pages for the longest that may meet, and no more."""
    from k3jax.generate import PAGE_TOKENS, Engine, padded_length

    sizes = sorted(len(request.prompt) + request.max_tokens for request in requests)
    if asked.max_len is not None:  # a longer one is refused by its name
        sizes = [min(size, max(1, asked.max_len)) for size in sizes]
    slots = min(asked.slots, len(sizes))
    pages = sum(-(-size // PAGE_TOKENS) for size in sizes[-slots:])
    longest = max(len(request.prompt) for request in requests)
    pages += asked.snapshots * (longest // PAGE_TOKENS)
    try:
        return Engine(
            trained.cfg.model, trained.params, trained.buffers, tokenizer, slots=slots,
            max_len=padded_length(sizes[-1]) if asked.max_len is None else asked.max_len,
            pages=1 << (pages - 1).bit_length(),  # few different sizes, as each is a compilation
            snapshots=asked.snapshots,
            mesh=mesh,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from error


def _checked(engine: "Engine", request: "Request") -> "Request":
    try:
        engine.check(request)
    except ValueError as error:
        raise UserError(str(error)) from error
    return request


def _begun(engine: "Engine", request: "Request") -> "Iterator[Event]":
    """The events of one request; says what goes on before the first."""
    events = engine.run([_checked(engine, request)])
    print(f"reading {len(request.prompt):,} tokens; the first time, this compiles", file=sys.stderr)
    return events


def _continue(asked, loaded, defaults, mesh) -> int:
    """Prints a prompt and what follows, as it comes."""
    trained, tokenizer = loaded()
    request = replace(defaults, prompt=(tokenizer.bos_id, *tokenizer.encode(asked.prompt)))
    engine = _engine(asked, trained, tokenizer, [request], mesh)
    text = asked.prompt  # with the first piece: compiling comes before it and logs its choices
    for event in _begun(engine, request):
        print(text + event.text, end="", flush=True)
        text = ""
        if event.result is not None:
            print()
            _report(asked, engine, event.result.logprobs)
    return 0


def _chat(asked, loaded, defaults, mesh) -> int:
    """Prints the answer to a conversation: reasoning to stderr, content and tool calls to stdout."""
    from k3jax.data.chat_parser import ChatParser, ContentDelta, ReasoningDelta
    from k3jax.generate_jobs import make_request

    fields = read_chat(asked.chat)
    trained, tokenizer = loaded()
    request = make_request(fields, tokenizer, defaults, defaults.seed)
    engine = _engine(asked, trained, tokenizer, [request], mesh)
    parser = ChatParser("think" if fields.get("thinking", True) else "response")

    def show(deltas):
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                print(delta.text, end="", flush=True, file=sys.stderr)
            elif isinstance(delta, ContentDelta):
                print(delta.text, end="", flush=True)

    for event in _begun(engine, request):
        show(parser.push(event.text))
        if event.result is not None:
            deltas, message = parser.finish()
            show(deltas)
            print()
            for call in message.to_dict().get("tool_calls", ()):
                print(json.dumps(call, ensure_ascii=False))
            print(file=sys.stderr)
            if event.result.finish_reason == "length":
                print(
                    f"cut off after {len(event.result.tokens)} tokens: --max-tokens gives room for "
                    "more",
                    file=sys.stderr,
                )
            _report(asked, engine, event.result.logprobs)
    return 0


def read_chat(path: str) -> dict[str, Any]:
    """A chat file's messages, alone or in an object like a line of a file of requests.

    Raises: UserError naming the file and what is wrong.
    """
    from k3jax.generate_jobs import check_fields

    with disk_errors(f"chat {path} not readable"):
        content = Path(path).expanduser().read_bytes()
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"chat {path} is not JSON ({error})") from None
    fields = {"messages": fields} if isinstance(fields, list) else fields
    if not isinstance(fields, dict) or "messages" not in fields:
        raise UserError(f"chat {path} holds no list of messages")
    check_fields(fields, f"chat {path}")
    return fields


def _many(asked, loaded, defaults, mesh) -> int:
    """Serves a file of requests."""
    from k3jax import hosts
    from k3jax.data.tokenizer import digest
    from k3jax.generate_jobs import Output, check_requests, read_jobs, requests_of, run_jobs

    jobs = read_jobs(asked.input)
    if (
        len({os.path.realpath(os.path.expanduser(name)) for name in (asked.input, asked.output)})
        < 2
    ):
        raise UserError(f"--input and --output are the same file {asked.input}: choose another")
    output = Output(asked.output, jobs)
    hosts.same("the finished requests", digest("\n".join(sorted(map(repr, output.lines))).encode()))
    trained, tokenizer = loaded()
    requests = requests_of(jobs, tokenizer, defaults)
    model = repr((trained.cfg.name, trained.cfg.model, trained.step, tokenizer.fingerprint))
    output.claim(jobs, requests, f"{model}, {asked.logprobs}")
    engine = _engine(asked, trained, tokenizer, requests, mesh)
    check_requests(engine, jobs, requests)
    run_jobs(engine, jobs, requests, output, logprobs=asked.logprobs)
    _report(asked, engine, [])
    return 0


def _report(asked: GenerateArgs, engine: "Engine", logprobs: list[float]) -> None:
    """One line on stderr: how fast it was."""
    parts = engine.stats.rates()
    if asked.logprobs and logprobs:
        parts.append(f"{sum(logprobs) / len(logprobs):.4f} nats per token")
    if parts:
        print("; ".join(parts), file=sys.stderr)
