"""Text to token ids and back: what a tokenizer offers, the byte tokenizer, and how one is loaded.

Ordinary text never becomes a control token: `encode` treats "<|open|>" as eight characters.
Controls enter through their ids (`bos_id`, `eos_id`, `specials`), or through `encode_controls`,
which is for text that the program itself wrote.
"""

import abc
import codecs
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsInt

import numpy as np
from jaxtyping import Int

from k3jax.errors import UserError


def utf8(text: str) -> bytes:
    """UTF-8 bytes of `text`; surrogate pairs are joined, lone surrogates become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


class StreamDecoder:
    """Text of a growing token sequence; a character split over tokens waits until it is whole.

    The pushed parts and the final `flush()`, joined, equal `decode` of all ids.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class Tokenizer(abc.ABC):
    """What the data pipeline, the loss and the sampler ask of a tokenizer.

    Attributes:
        name: for messages: "bytes" or the file's path.
        size: ids are 0 ... size-1; the model's vocab_size must not be smaller.
        bos_id, eos_id: begin and end of a document.
        pad_id: fills rows; segment 0 marks padding, so the loss never sees this id.
        specials: control tokens by name.
        fingerprint: changes whenever ids would; part of the data position in a checkpoint.
    """

    name: str
    size: int
    bos_id: int
    eos_id: int
    pad_id: int
    specials: dict[str, int]
    fingerprint: str

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text, without begin or end tokens and without control tokens."""

    def encode_controls(self, text: str) -> list[int]:
        """Ids of text in which the names in `specials` are control tokens: no text of a user's."""
        found = self._special_names.split(text)  # text, name, text, ..., text
        ids = self.encode(found[0])
        for name, after in zip(found[1::2], found[2::2], strict=True):
            ids.append(self.specials[name])
            ids += self.encode(after)
        return ids

    @functools.cached_property
    def _special_names(self) -> re.Pattern[str]:
        names = sorted(self.specials, key=len, reverse=True)  # the longest that fits
        return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    @abc.abstractmethod
    def piece(self, token: int) -> bytes:
        """UTF-8 bytes of one token, possibly part of a character; a special gives its name."""

    @abc.abstractmethod
    def token_bytes(self) -> Int[np.ndarray, " X"] | None:
        """Bytes of text each id stands for (specials 0), or None where that is not defined."""

    def encode_bytes(self, data: bytes) -> Int[np.ndarray, " T"]:
        """Ids of UTF-8 text as int32."""
        return np.asarray(self.encode(data.decode("utf-8", "replace")), np.int32)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, an id out of range raises."""
        return b"".join(self.piece(int(token)) for token in ids).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    def _in_range(self, token: int) -> int:
        if not 0 <= token < self.size:
            raise ValueError(
                f"token id {token} is outside 0..{self.size - 1} of tokenizer {self.name!r}"
            )
        return token


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, then begin, end and padding: no file, any text, 259 ids."""

    name = "bytes"
    size = 259
    bos_id, eos_id, pad_id = 256, 257, 258
    fingerprint = "bytes-259"

    def __init__(self):
        self.specials = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}
        self._pieces = [bytes([i]) for i in range(256)] + [s.encode() for s in self.specials]

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_bytes(self, data: bytes) -> Int[np.ndarray, " T"]:
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def piece(self, token: int) -> bytes:
        return self._pieces[self._in_range(token)]

    def token_bytes(self) -> Int[np.ndarray, " X"]:
        return (np.arange(self.size) < 256).astype(np.int32)


def digest(content: bytes) -> str:
    """Short name of a file's content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def tokenizer_file(spec: str) -> Path:
    """The file of a tokenizer that is no "bytes"; a folder without one stands for itself."""
    path = Path(spec).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, also answers for a name that is too long
        found = [path / name for name in ("tokenizer.json", "tiktoken.model")]
        path = next((file for file in found if file.exists()), path)
    return path


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer called "bytes", or the one in a file, or in a folder that holds such a file.

    Args:
        spec: "bytes", a `*.json` (Hugging Face `tokenizers`), a `*.model` or `*.tiktoken` (base64
            ranks), or a folder with `tokenizer.json` or `tiktoken.model`.

    Raises: UserError naming the path and what is expected there.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = tokenizer_file(spec)
    expected = "give 'bytes', a tokenizer.json or a tiktoken file (*.model, *.tiktoken)"
    if not os.path.isfile(path):
        raise UserError(f"tokenizer {spec!r} is not a file or holds none; {expected}")
    try:
        if path.suffix == ".json":
            from k3jax.data.huggingface import HuggingFaceTokenizer

            return HuggingFaceTokenizer(path)
        if path.suffix in (".model", ".tiktoken"):
            from k3jax.data.tiktoken_bpe import TiktokenTokenizer

            return TiktokenTokenizer(path)
    except OSError as error:
        raise UserError(
            f"tokenizer {spec!r} cannot be read ({error.strerror}); {expected}"
        ) from None
    raise UserError(f"tokenizer {spec!r} has suffix {path.suffix!r}; {expected}")


MODELS_OWN = "give the model's own with --tokenizer FILE"  # where the model is there already


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, fix: str = "") -> None:
    """Raises UserError if the model's embedding has fewer rows than the tokenizer has ids.

    Args:
        fix: what the user should do about it; enlarge the model if omitted.
    """
    if tokenizer.size > vocab_size:
        larger = f"set --model.vocab-size {tokenizer.size} or more, or choose another --tokenizer"
        raise UserError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.size} ids, vocab_size is {vocab_size};"
            f" {fix or larger}"
        )
