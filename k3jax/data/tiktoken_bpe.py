"""Byte-level BPE from a tiktoken rank file, with K3's split pattern and special tokens."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from k3jax.data.tokenizer import Tokenizer, digest
from k3jax.errors import UserError

# Offsets from the first id after the ranks; every other one of the 256 is reserved.
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
NUM_K3_SPECIALS = 256

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
K3_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MAX_PIECE_CHARS = 400_000  # the splitter overflows its stack on much longer inputs
MAX_RUN_CHARS = 25_000  # BPE is quadratic in the length of one piece


def cut_long(
    text: str, max_piece: int = MAX_PIECE_CHARS, max_run: int = MAX_RUN_CHARS
) -> Iterator[str]:
    """`text` in parts of at most `max_piece` characters, runs of (non-)space cut at `max_run`."""
    for start in range(0, len(text), max_piece):
        part = text[start : start + max_piece]
        begin = 0
        if len(part) > max_run:
            for run in re.finditer(r"\s+|\S+", part):
                for cut in range(run.start() + max_run, run.end(), max_run):
                    yield part[begin:cut]
                    begin = cut
        yield part[begin:]


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE from a tiktoken rank file, followed by K3's 256 special ids.

    With the released 163,584 ranks the specials are 163,584 ([BOS]) to 163,839 ([PAD]); with a
    smaller file they follow its last rank.
    """

    def __init__(self, path: Path):
        import tiktoken

        content = path.read_bytes()
        ranks = _read_ranks(content, path)
        base = len(ranks)
        names = {
            base + i: K3_SPECIALS.get(i, f"<|reserved_token_{base + i}|>")
            for i in range(NUM_K3_SPECIALS)
        }
        self.name = str(path)
        self.size = base + NUM_K3_SPECIALS
        self.specials = {name: token for token, name in names.items()}
        self.bos_id, self.eos_id = self.specials["[BOS]"], self.specials["[EOS]"]
        self.pad_id = self.specials["[PAD]"]
        self.fingerprint = digest(content)
        self._pieces = [*ranks, *(name.encode() for name in names.values())]
        self._bpe = tiktoken.Encoding(
            path.name, pat_str=K3_SPLIT, mergeable_ranks=ranks, special_tokens=self.specials
        )

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in cut_long(text):
            ids += self._bpe.encode_ordinary(part)
        return ids

    def piece(self, token: int) -> bytes:
        return self._pieces[self._in_range(token)]

    def token_bytes(self) -> Int[np.ndarray, " X"]:
        ranks = self._pieces[:-NUM_K3_SPECIALS]
        return np.array([len(p) for p in ranks] + [0] * NUM_K3_SPECIALS, np.int32)


def _read_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Token bytes → rank, in rank order, from lines `base64 rank`; checked to be 0 ... n-1."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(
                f"tokenizer {str(path)!r} is not a tiktoken file: line {number} is no 'base64 rank'"
                " pair; convert a SentencePiece model to tokenizer.json and name that"
            ) from None
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    if list(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"tokenizer {str(path)!r} has {len(ranks)} distinct tokens whose ranks are not"
            f" 0..{len(ranks) - 1}; fetch the file again"
        )
    missing = [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise UserError(
            f"tokenizer {str(path)!r} lacks {len(missing)} of the 256 single bytes, first"
            f" 0x{missing[0]:02x}; fetch the file again"
        )
    return ranks
