"""A small vocabulary for small models: byte-level BPE with K3's split pattern, as a rank file.

It stands in for the released one: `TiktokenTokenizer` reads it and puts K3's 256 special ids after
its ranks, so chats, documents and models work the same with 4,096 ids as with 163,840.
"""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from k3jax.data.huggingface import byte_of_letter
from k3jax.data.text import Corpus, Split
from k3jax.data.tiktoken_bpe import K3_SPLIT, NUM_K3_SPECIALS, cut_long
from k3jax.display import Transfer
from k3jax.errors import UserError, disk_errors

FEWEST = 256 + NUM_K3_SPECIALS  # ids without any merge
MOST = 2**20  # the trainer takes memory for all before it begins; the release has 163,840


def train_bpe(corpus: Corpus, size: int) -> bytes:
    """Learns merges from the training split; the same corpus and size give the same bytes.

    Args:
        corpus: what to learn from.
        size: ids in all: 256 bytes, merges, and the 256 special tokens that follow the ranks.

    Returns: a rank file, one line `base64 rank` per token: the bytes first, then the merges in the
        order in which they were learned.
    Raises: UserError if the size is out of range or the corpus has not enough to merge.
    Cost: about 0.2 s per MB of text on two cores; memory is that of the distinct words.
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    if not FEWEST < size <= MOST:
        raise UserError(
            f"size is {size}; it must be above {FEWEST}, bytes and special tokens, and at most {MOST:,}"
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(K3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size - NUM_K3_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # its bars would overwrite ours
    )
    split = corpus.split("train")
    bpe.train_from_iterator(_texts(split, sum(corpus.sizes), size - FEWEST), trainer)
    ids = bpe.get_vocab()
    if len(ids) + NUM_K3_SPECIALS < size:
        raise UserError(
            f"data {corpus.name!r} has pieces for {len(ids) + NUM_K3_SPECIALS} ids, size is {size};"
            " ask for fewer or give more data"
        )
    byte = byte_of_letter()
    lines = (
        base64.b64encode(bytes(byte[letter] for letter in token)) + b" %d\n" % rank
        for token, rank in sorted(ids.items(), key=lambda item: item[1])
    )
    return b"".join(lines)


def check_output(path: Path) -> None:
    """Raises UserError unless a rank file may be written there; asked before the work."""
    if path.suffix not in (".model", ".tiktoken"):
        raise UserError(f"--out {str(path)!r} has suffix {path.suffix!r}; use .model or .tiktoken")
    if os.path.exists(path):  # unlike Path.exists, also for too long a name
        raise UserError(f"--out {str(path)!r} exists, runs may need it; choose another name")


def write_ranks(content: bytes, path: Path) -> None:
    """Writes a rank file whole or not at all.

    Raises: UserError with the system's reason.
    """
    part = path.with_name(f"{path.name}.part")
    with disk_errors(f"tokenizer {str(path)!r} not written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, path)


def _texts(split: Split, size: int, merges: int) -> Iterator[str]:
    """The documents, cut as the tokenizer cuts them, with the progress over `size` bytes of files."""
    with Transfer("reading", total=size) as progress:
        for index in range(len(split)):
            document = split[index]
            if document is not None:
                yield from cut_long(document.data.decode("utf-8", "replace"))
            progress.add(size * (index + 1) // len(split) - size * index // len(split))
    Console().print(f"learning {merges:,} merges", highlight=False)
