"""Generation: requests enter free slots between blocks of tokens, and leave when they are done."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from k3jax.data.tokenizer import Tokenizer
from k3jax.decode_loop import (
    MAX_STOP_IDS,
    Admission,
    Place,
    admit,
    generate_block,
    init_slots,
    read_chunk,
    restore,
    snapshot,
)
from k3jax.decode_state import init_decode_state, state_bytes
from k3jax.devices import device_memory
from k3jax.errors import UserError
from k3jax.model import K3Config
from k3jax.paged_cache import PagePool, PrefixCache, SlotPool
from k3jax.request import Event, Request, Result, Running, Stats, TextStream
from k3jax.sample import sampling_rows
from k3jax.stacks import restacked

CHUNK = 512  # tokens of a prompt read at once, and from snapshot to snapshot
PAGE_TOKENS = 64
MATRICES = {"kernel", "w1", "w2", "w3", "embedding"}  # leaves that are only used in compute dtype
FLOAT32 = {"gate", "q_conv1d", "k_conv1d", "v_conv1d"}  # modules whose kernel is used in float32


class Engine:
    """A model with its decode state and compiled programs; it serves any number of requests.

    What a request gets does not depend on the others, on its slot, or on what lay there before.
    Programs: one per chunk bucket (four at most), one for a block of tokens, and three small ones.
    """

    def __init__(
        self,
        cfg: K3Config,
        params: Any,
        buffers: Any,
        tokenizer: Tokenizer | None,
        *,
        slots: int = 8,
        max_len: int = 4096,
        pages: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        chunk: int = CHUNK,
        snapshots: int = 0,
        mesh: Mesh | None = None,
    ):
        """
        Args:
            cfg: model config.
            params, buffers: pure dicts. Matrices are cast once to the compute dtype.
            tokenizer: which ids may be generated, which ends a document, and the text; None: all
                ids, no end, no text.
            slots: requests that are generated together.
            max_len: tokens of a request, prompt and output.
            pages: of latents, for all slots; None: enough for all at full length.
            page_tokens: tokens of a page.
            chunk: tokens of a prompt read at once: whole pages, whole chunks of the KDA layers.
            snapshots: states at multiples of `chunk` tokens kept of past prompts, for those that
                begin alike; 0: none.
            mesh: devices over which params and buffers lie (`run_dir.load_trained`); every device
                reads all requests. None: one device. Of several processes, all make the same calls.

        Raises: ValueError naming a size that does not fit.
        """
        for name, value in (("slots", slots), ("max_len", max_len), ("page_tokens", page_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name, size in (("page_tokens", page_tokens), ("kda.chunk_size", cfg.kda.chunk_size)):
            if chunk < 2 or chunk % size:
                raise ValueError(f"chunk is {chunk}; it must be a multiple of {name}={size}")
        if mesh is not None and mesh.shape["context"] > 1:
            raise ValueError(
                f"mesh.context is {mesh.shape['context']}; tokens of a request are not split, use "
                "another axis"
            )
        if tokenizer is not None and tokenizer.size > cfg.vocab_size:
            raise ValueError(
                f"tokenizer has {tokenizer.size} ids, model.vocab_size is {cfg.vocab_size}: use the "
                "run's own tokenizer"
            )
        self.tokenizer, self.chunk = tokenizer, chunk
        self.max_len, self._page_tokens = max_len, page_tokens
        self._table_width = -(-max_len // page_tokens)
        pages = slots * self._table_width if pages is None else pages
        _check_room(cfg, slots, max_len, pages, page_tokens, 1 if mesh is None else mesh.size)
        self._slot_pool, self._pages = SlotPool(slots), PagePool(pages)
        self._prefixes = PrefixCache(snapshots, chunk, self._pages)
        self._running: dict[int, Running] = {}
        weights = compute_weights(cfg, params), buffers
        if mesh is None:  # on a mesh each layer's matrices are gathered anyway
            cfg, *weights = unstacked(cfg, *weights)
        self.cfg, self._weights = cfg, tuple(weights)
        self._place = Place(cfg, mesh)
        allowed = np.zeros(cfg.vocab_size, bool)
        allowed[: cfg.vocab_size if tokenizer is None else tokenizer.size] = True
        if tokenizer is not None:
            silent = {tokenizer.bos_id, tokenizer.pad_id} - {tokenizer.eos_id}
            allowed[list(silent)] = False
        self._allowed = allowed
        self._slots = init_slots(self._place, slots, max_len, pages=pages, page_tokens=page_tokens)
        self.stats = Stats()
        self._called: set[int] = set()  # widths of the programs that have run

    @property
    def state_bytes(self) -> int:
        """Bytes of the decode state: pages, memories, conv inputs, tables."""
        return state_bytes(self._slots.state)

    @property
    def buckets(self) -> list[int]:
        """Lengths that a chunk is padded to, each a program."""
        halves = {max(self.chunk >> shift, min(16, self.chunk)) for shift in range(4)}
        return sorted(halves)

    def check(self, request: Request) -> None:
        """Raises ValueError, naming the value, for a request that could never be served."""
        request.sampling.check()
        if not len(request.prompt):
            raise ValueError("every prompt needs at least one token")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.cfg.vocab_size:
            raise ValueError(
                f"prompt holds token {low if low < 0 else high}, model.vocab_size is "
                f"{self.cfg.vocab_size}"
            )
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens}; it must be at least 1")
        if not 0 <= request.seed < 2**32:
            raise ValueError(f"seed is {request.seed}; it must be at least 0 and below 2**32")
        if "" in request.stop or isinstance(request.stop, str):
            raise ValueError(f"stop is {request.stop!r}; give strings of at least one character")
        if request.stop and self.tokenizer is None:
            raise ValueError(f"stop is {request.stop!r}, and there is no tokenizer")
        if len(self._stop_ids(request)) > MAX_STOP_IDS:
            raise ValueError(
                f"{len(request.stop_ids)} stop_ids are too many; {MAX_STOP_IDS} fit, with the "
                "tokenizer's own"
            )
        size = len(request.prompt) + request.max_tokens
        if size > self.max_len:
            raise ValueError(
                f"max_len is {self.max_len}; a prompt of {len(request.prompt)} tokens and "
                f"max_tokens={request.max_tokens} need {size}: raise it, or ask for fewer"
            )
        if (needed := self._pages_for(size)) > self._pages.size:
            raise ValueError(
                f"pages is {self._pages.size}; a request of {size} tokens needs {needed} pages of "
                f"{self._page_tokens}"
            )

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Serves the requests in order, as many at once as there are slots; events as they come.

        Requests are taken from the iterable when there is room for them. One that cannot be served
        raises as in `check`. Leaving the iteration early drops what is under way.
        """
        if self._running:
            raise ValueError("the engine is serving requests already: finish that iteration first")
        coming = self._checked(requests)
        waiting = next(coming, None)
        try:
            while waiting is not None or self._running:
                while waiting is not None and self._admit(*waiting):
                    waiting = next(coming, None)
                yield from self._block()
        finally:
            for slot in list(self._running):
                self._leave(slot)

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """All results, in the order of the requests."""
        found = {event.index: event.result for event in self.run(requests) if event.result}
        return [found[index] for index in sorted(found)]

    def stream_text(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Continuation of one text, in pieces of whole characters; settings as of `Request`."""
        assert self.tokenizer is not None
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        for event in self.run([Request(prompt=ids, **settings)]):
            yield event.text

    def _checked(self, requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
        for index, request in enumerate(requests):
            self.check(request)
            yield index, request

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _stop_ids(self, request: Request) -> set[int]:
        eos = set() if self.tokenizer is None else {self.tokenizer.eos_id}
        return eos | set(request.stop_ids)

    def _admit(self, index: int, request: Request) -> bool:
        """Puts a request into a slot and reads its prompt; False if there is no room now."""
        slot = self._slot_pool.allocate()
        if slot is None:
            return False
        prompt = np.asarray(request.prompt, np.int32)
        names = self._prefixes.names(prompt)
        found = self._prefixes.find(names, len(prompt))
        shared = [] if found is None else list(found.pages)
        self._pages.share(shared)  # before anything is allocated, which may drop the snapshot
        needed = self._pages_for(len(prompt) + request.max_tokens) - len(shared)
        while (own := self._pages.allocate(needed)) is None:
            if not self._prefixes.drop():
                self._pages.release(shared)
                self._slot_pool.release(slot)
                return False
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer.stream(), request.stop)
        self._running[slot] = Running(index, request, [*shared, *own], text)
        self._slots = self._call(admit, self._slots, slot, self._admission(request, slot, prompt))
        begin = 0
        if found is not None:
            begin = found.length
            self._slots = self._call(restore, self._slots, slot, begin, found.row)
        self.stats.restored += begin
        self.stats.prompt += len(prompt) - begin
        self._read_prompt(slot, prompt, begin, names)
        return True

    def _admission(self, request: Request, slot: int, prompt: np.ndarray) -> Admission:
        table = np.zeros(self._table_width, np.int32)
        pages = self._running[slot].pages
        table[: len(pages)] = pages
        seen = np.zeros(self.cfg.vocab_size, bool)
        seen[prompt] = True
        stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
        own = sorted(self._stop_ids(request))
        stop_ids[: len(own)] = own
        return Admission(
            table,
            seen,
            np.asarray(request.max_tokens, np.int32),
            np.asarray(request.seed, np.uint32),
            stop_ids,
            sampling_rows([request.sampling]),
        )

    def _read_prompt(self, slot: int, prompt: np.ndarray, begin: int, names: list[bytes]) -> None:
        """Prefill from a multiple of the chunk on, in bounded memory."""
        start, known = time.perf_counter(), len(self._called)
        for at in range(begin, len(prompt), self.chunk):
            piece = prompt[at : at + self.chunk]
            width = next(size for size in self.buckets if size >= len(piece))
            self._called.add(width)
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(piece)] = piece
            end = at + len(piece)
            self._slots = self._call(
                read_chunk, self._weights, self._slots, slot, tokens, len(piece), end == len(prompt)
            )
            if names and end % self.chunk == 0:
                pages = self._running[slot].pages[: end // self._page_tokens]
                self._prefixes.add(
                    names[end // self.chunk - 1], end, pages,
                    lambda: self._call(snapshot, self._slots, slot),
                )  # fmt: skip
        jax.block_until_ready(self._slots.logits)
        if len(self._called) == known:
            self.stats.timed_prompt += len(prompt) - begin
            self.stats.prompt_seconds += time.perf_counter() - start

    def _block(self) -> Iterator[Event]:
        start, known = time.perf_counter(), len(self._called)
        self._called.add(1)
        keep = np.zeros(self._slot_pool.size, bool)
        keep[list(self._running)] = True
        self._slots, block = self._call(
            generate_block, self._weights, self._slots, keep, self._allowed
        )
        tokens, logprobs, counts, active = (x.tolist() for x in jax.device_get(block))
        if len(self._called) == known:
            self.stats.timed_generated += sum(counts)
            self.stats.generated_seconds += time.perf_counter() - start
        for slot, running in list(self._running.items()):
            n, stops = counts[slot], self._stop_ids(running.request)
            if not all(map(math.isfinite, logprobs[slot][:n])):
                raise UserError(
                    f"after {len(running.tokens)} tokens of request {running.index + 1} the model gives "
                    "logits that are not finite: its training diverged or its weights are damaged; "
                    "use an earlier --step, or import it again"
                )
            event = running.take(tokens[slot][:n], logprobs[slot][:n], not active[slot], stops)
            self.stats.generated += len(event.tokens)
            if event.result is not None:
                self._leave(slot)
            yield event

    def _call(self, program: Any, *args: Any) -> Any:
        """Runs one of the compiled programs where the model lies; numbers are arguments, not constants."""
        fixed = {int: np.int32, bool: np.bool_}
        with self._place.activate():
            return program(self._place, *(fixed.get(type(x), lambda x: x)(x) for x in args))

    def _leave(self, slot: int) -> None:
        self._pages.release(self._running.pop(slot).pages)
        self._slot_pool.release(slot)


def _check_room(
    cfg: K3Config, slots: int, max_len: int, pages: int, page_tokens: int, devices: int
) -> None:
    """Raises ValueError for a state that the devices cannot hold, before anything is allocated."""
    for name, value in (("slots", slots), ("max_len", max_len), ("pages", pages)):
        if value >= 2**31:
            raise ValueError(f"{name} is {value}; it must be below 2**31")
    state = jax.eval_shape(
        lambda: init_decode_state(cfg, slots, max_len, pages=pages, page_tokens=page_tokens)
    )
    if (needed := state_bytes(state)) > (have := device_memory() * devices):
        raise ValueError(
            f"slots={slots} and max_len={max_len} need {needed:,} bytes for {pages} pages and memories, "
            f"there are {have:,}: lower slots, max_len or max_tokens"
        )


def compute_weights(cfg: K3Config, params: Any) -> Any:
    """Parameters for many forward passes: matrices in the compute dtype, what is float32 as it is.

    Layers cast a matrix where they use it, so the numbers stay the same; but the float32 masters of
    a bfloat16 model would be read for every token.
    """

    def cast(path, x):
        names = [part.key for part in path]
        used = names[-1] in MATRICES and not FLOAT32.intersection(names)
        return x.astype(cfg.dtype) if used else x

    return jax.tree_util.tree_map_with_path(cast, params)


def unstacked(cfg: K3Config, params: Any, buffers: Any) -> tuple[K3Config, Any, Any]:
    """The same model with every layer for itself.

    In a scan over a stack each step cuts a layer's matrices out of it: a copy of all of them, for one
    token, of which the routed experts would need a few.
    """
    flat = replace(cfg, scan_layers=False)
    return flat, restacked(params, cfg, flat), restacked(buffers, cfg, flat)


def padded_length(tokens: int) -> int:
    """Room for so many tokens in whole pages, and in few different sizes (each is a compilation)."""
    return max(PAGE_TOKENS, 1 << math.ceil(math.log2(tokens)))
