"""A Hugging Face `tokenizer.json`: any model, no control token from ordinary text."""

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import numpy as np
from jaxtyping import Int

from k3jax.data.tokenizer import StreamDecoder, Tokenizer, digest, utf8
from k3jax.errors import UserError

if TYPE_CHECKING:
    import tokenizers

_ROLES = {  # names in use when no tokenizer_config.json says which token is which
    "bos": ("<|begin_of_text|>", "[BOS]", "<s>", "<bos>", "<|startoftext|>", "[CLS]"),
    "eos": ("<|end_of_text|>", "[EOS]", "</s>", "<eos>", "<|endoftext|>", "[SEP]"),
    "pad": ("<|pad|>", "[PAD]", "<pad>"),
}


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; begin, end and padding come from a `tokenizer_config.json` beside it.

    Without that file they are found by the usual names. Truncation, padding and the template of
    the JSON file are switched off: documents are encoded whole and unframed.
    """

    def __init__(self, path: Path):
        import tokenizers

        content = path.read_bytes()
        spec = _json_object(content, path)
        with _BareException(f"tokenizer {str(path)!r} is not a valid tokenizer.json"):
            self._inner = tokenizers.Tokenizer.from_str(content.decode())
        self._inner.encode_special_tokens = True  # "</s>" in a document is four characters
        self._inner.no_truncation()
        self._inner.no_padding()
        added = spec.get("added_tokens") or []
        vocab = self._inner.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.size = max(vocab.values()) + 1
        self.specials = {t["content"]: t["id"] for t in added if t.get("special")}
        self.eos_id, self.bos_id, self.pad_id = self._roles(path, vocab)
        self._pieces = _byte_pieces(spec, vocab, self.size)
        roles = (self.bos_id, self.eos_id, self.pad_id)
        self.fingerprint = digest(content + repr(roles).encode())
        unknown = self.specials.get(spec["model"].get("unk_token"))  # any word may become this one
        controls = {*self.specials.values(), *roles} - {unknown}
        names = [re.escape(name) for name, token in vocab.items() if token in controls]
        self._controls = np.array(sorted(controls), np.int32)
        self._control_names = re.compile("|".join(names))

    def _roles(self, path: Path, vocab: dict[str, int]) -> tuple[int, int, int]:
        config_path = path.with_name("tokenizer_config.json")
        has_config = config_path.exists()
        config = _json_object(config_path.read_bytes(), config_path) if has_config else {}

        def find(role: str) -> int | None:
            named = config.get(f"{role}_token")
            named = named.get("content") if isinstance(named, dict) else named
            names = (named,) if named else _ROLES[role]
            return next((vocab[name] for name in names if name in vocab), None)

        eos = find("eos")
        if eos is None:
            raise UserError(
                f"tokenizer {str(path)!r} has no token known to end a document; put a"
                ' tokenizer_config.json with "eos_token" beside it'
            )
        bos, pad = find("bos"), find("pad")
        return eos, eos if bos is None else bos, eos if pad is None else pad

    def encode(self, text: str) -> list[int]:
        text = utf8(text).decode()
        ids = self._inner.encode(text, add_special_tokens=False).ids
        if not np.isin(ids, self._controls).any():
            return ids
        # Word-level vocabularies hold their controls as words: take those words apart.
        cuts = [0, *(m.start() + 1 for m in self._control_names.finditer(text)), len(text)]
        parts = (text[a:b] for a, b in itertools.pairwise(cuts))
        ids = [i for p in parts for i in self._inner.encode(p, add_special_tokens=False).ids]
        return [i for i in ids if i not in self._controls]

    def piece(self, token: int) -> bytes:
        if self._pieces is not None:
            return self._pieces[self._in_range(token)]
        return (self._inner.id_to_token(self._in_range(token)) or "").encode()

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        if self._pieces is not None:
            return super().decode(ids)
        return self._inner.decode([self._in_range(int(i)) for i in ids], skip_special_tokens=False)

    def stream(self) -> StreamDecoder:
        if self._pieces is not None:
            return super().stream()
        return _TextStreamDecoder(self, self._inner)

    def token_bytes(self) -> Int[np.ndarray, " X"] | None:
        if self._pieces is None:
            return None
        lengths = np.array([len(piece) for piece in self._pieces], np.int32)
        lengths[self._controls] = 0
        return lengths


class _TextStreamDecoder(StreamDecoder):
    """For vocabularies whose decoder joins words, so that a token has no bytes of its own."""

    def __init__(self, tokenizer: "HuggingFaceTokenizer", inner: "tokenizers.Tokenizer"):
        from tokenizers.decoders import DecodeStream

        super().__init__(tokenizer)
        self._inner, self._step = inner, DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._step.step(self._inner, token) or ""
        self._shown += text
        return text

    def flush(self) -> str:
        return self._tokenizer.decode(self._ids)[len(self._shown) :]


def _byte_pieces(spec: dict, vocab: dict[str, int], size: int) -> list[bytes] | None:
    """Bytes of each id of a byte-level BPE; None for other kinds, or if the text is normalised."""
    steps = spec.get("pre_tokenizer") or {}
    kinds = {step.get("type") for step in steps.get("pretokenizers", [steps])}
    normalizer = (spec.get("normalizer") or {}).get("type")
    if spec["model"].get("type") != "BPE" or "ByteLevel" not in kinds:
        return None
    if normalizer not in (None, "NFC"):
        return None
    table = byte_of_letter()
    added = {token["content"] for token in spec.get("added_tokens") or []}
    pieces = [b""] * size
    for text, token in vocab.items():
        if text in added:
            pieces[token] = text.encode()
        elif all(letter in table for letter in text):
            pieces[token] = bytes(table[letter] for letter in text)
        else:
            return None
    return pieces


def byte_of_letter() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest moves to U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(moved)}


class _BareException:
    """Turns the plain `Exception` that `tokenizers` raises, and no subclass, into UserError."""

    def __init__(self, message: str):
        self._message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is Exception:
            raise UserError(f"{self._message}: {error}") from error


def _json_object(content: bytes, path: Path) -> dict:
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not JSON ({error}); fetch the file again") from None
    if not isinstance(spec, dict):
        raise UserError(f"{str(path)!r} holds a JSON {type(spec).__name__}, not an object")
    return spec
