"""The stand-in vocabulary: its file, its merges, the special ids behind them, and the command."""

import base64
import itertools
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from k3jax import cli
from k3jax.data.bpe_training import check_output, train_bpe, write_ranks
from k3jax.data.huggingface import byte_of_letter
from k3jax.data.text import load_corpus
from k3jax.data.tiktoken_bpe import K3_SPECIALS, K3_SPLIT
from k3jax.data.tokenizer import load_tokenizer
from k3jax.errors import UserError

TEXTS = [
    "",
    "def f(x):\n\treturn x  # tab\r\n\r\n   end   ",
    "中文abc 漢字かな交じり 한국어",
    "naïve café Ωμέγα עברית العربية ǅungla ʰh",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f600",
    "0 12 345 6789 ١٢٣ ½",
    '<|open|>message role="user"<|sep|>[BOS][EOS]<|end_of_msg|></s><s>',
    "NUL \x00 and BOM \ufeff inside, a lone \ud800 surrogate",
    "What's can't I'LL they'd",
    "aaaaaaaaaaaa abababab" * 20,
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        text = "\n".join(text.replace("\ud800", "") * (number + 2) for text in TEXTS)
        words = [f"{a}{b}{c}" for a, b, c in itertools.product("kimi", "delta", "rule")]
        (folder / f"{number}.txt").write_text(text + " ".join(words) + "漢字の" * 40)
    return load_corpus(str(folder))


@pytest.fixture(scope="module")
def content(corpus):
    return train_bpe(corpus, 800)


@pytest.fixture(scope="module")
def trained(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    write_ranks(content, path)
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def from_library(tmp_path_factory):
    """A vocabulary of the default corpus."""
    path = tmp_path_factory.mktemp("library") / "tiktoken.model"
    write_ranks(train_bpe(load_corpus(), 1500), path)
    return load_tokenizer(str(path))


def ranks_of(content):
    lines = [line.split() for line in content.splitlines()]
    assert [int(rank) for _, rank in lines] == list(range(len(lines)))
    return [base64.b64decode(token) for token, _ in lines]


def parts_of(token, ranks):
    """The token as merges of lower rank leave it."""
    parts = [bytes([byte]) for byte in token]
    while True:
        pairs = [a + b for a, b in itertools.pairwise(parts)]
        known = [
            (ranks[p], i) for i, p in enumerate(pairs) if ranks.get(p, len(ranks)) < ranks[token]
        ]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [pairs[i]]


def test_bytes_come_first_then_each_merge_of_two_earlier_tokens(content):
    tokens = ranks_of(content)
    assert len(tokens) == len(set(tokens)) == 800 - 256
    assert {*tokens[:256]} == {bytes([i]) for i in range(256)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    assert all(len(parts_of(token, ranks)) == 2 for token in tokens[256:])


def test_kf_086_special_ids_follow_the_ranks(trained):
    assert trained.size == 800
    base = 800 - 256
    assert {trained.piece(base + i).decode(): base + i for i in K3_SPECIALS} == {
        name: trained.specials[name] for name in K3_SPECIALS.values()
    }
    assert (trained.bos_id, trained.eos_id, trained.pad_id) == (base, base + 1, 799)
    assert trained.decode([base - 1, base, 799]).endswith("[BOS][PAD]")
    for token in (800, -1):
        with pytest.raises(ValueError, match=rf"token id {token} is outside 0\.\.799"):
            trained.decode([token])


@pytest.mark.parametrize("vocabulary", ["trained", "from_library"])
def test_kf_086_round_trip_of_any_text(request, vocabulary):
    tokenizer = request.getfixturevalue(vocabulary)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd")
        assert all(token < tokenizer.bos_id for token in ids)


@pytest.mark.parametrize("vocabulary", ["trained", "from_library"])
def test_encoding_equals_the_merges_one_by_one(request, vocabulary):
    """tiktoken merges by rank of the result, a BPE by the order of its merges: the same here."""
    tokenizer = request.getfixturevalue(vocabulary)
    tokens = [tokenizer.piece(i) for i in range(tokenizer.bos_id)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    letter = {byte: letter for letter, byte in byte_of_letter().items()}

    def letters(token):
        return "".join(letter[byte] for byte in token)

    bpe = tokenizers.Tokenizer(
        models.BPE(
            vocab={letters(token): rank for token, rank in ranks.items()},
            merges=[tuple(map(letters, parts_of(token, ranks))) for token in tokens[256:]],
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(K3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in [text.replace("\ud800", "") for text in TEXTS] + [Path(__file__).read_text()]:
        assert tokenizer.encode(text) == bpe.encode(text, add_special_tokens=False).ids


def test_merges_shorten_the_text_they_were_learned_from(from_library):
    text = Path(cli.__file__).read_text()
    assert len(from_library.encode(text)) < len(text.encode()) / 2


def test_the_same_corpus_gives_the_same_bytes_whatever_the_threads(corpus, content, tmp_path):
    assert train_bpe(load_corpus(corpus.name), 800) == content
    program = (
        "import sys; from k3jax.cli import main;"
        "code = main(['tokenizer', '--size', '800', '--out', sys.argv[1], '--data', sys.argv[2]]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    out = tmp_path / "folder" / "one.model"
    subprocess.run(
        [sys.executable, "-c", program, out, corpus.name],
        env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
        check=True,
        timeout=600,
    )
    assert out.read_bytes() == content
    assert [path.name for path in out.parent.iterdir()] == ["one.model"]


# ---- the command


@pytest.fixture
def command(capsys):
    """Runs the command in this process; returns code, output and error lines."""
    logger = logging.getLogger("k3jax")
    before = (logger.handlers[:], logger.level, logger.propagate)

    def run(*args):
        code = cli.main(["tokenizer", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


def test_the_command_shows_its_progress_and_what_comes_next(command, corpus, content, tmp_path):
    out = tmp_path / "small.tiktoken"
    code, lines, errors = command("--size", 800, "--out", out, "--data", corpus.name)
    assert (code, errors) == (0, [])
    assert lines[0].startswith(f"data {corpus.name}: 3 files")
    assert lines[1].startswith("reading ")
    assert lines[2] == "learning 288 merges"
    assert lines[3] == f"{out}: 800 ids; use --tokenizer {out} --model.vocab-size 800"
    assert out.read_bytes() == content


def test_help(command):
    code, lines, _ = command("--help")
    assert code == 0
    assert "--size INT" in " ".join(lines)


REFUSED = [
    ([], ["--out FILE.model"]),
    (["--out", "x.json"], ["'x.json'", "suffix '.json'", ".model or .tiktoken"]),
    (["--out", "here.model"], ["'here.model' exists", "another name"]),
    (["--out", f"{'x' * 300}.model", "--data", "enough.txt", "--size", "520"], ["xxx.model"]),
    (["--out", "x.model", "--size", "512"], ["size is 512", "above 512"]),
    (["--out", "x.model", "--data", "enough.txt", "--size", str(2**20 + 1)], ["1,048,576"]),
    (["--out", "x.model", "--data", "enough.txt", "--size", str(10**30)], ["size is 1000", "most"]),
    (["--out", "x.model", "--size", "ten"], ["--size", "ten", "whole number"]),
    (["--out", "x.model", "--data", "tiny.txt"], ["'tiny.txt'", "size is 4096", "more data"]),
    (["--out", "x.model", "--data", "nowhere"], ["'nowhere'", "does not exist"]),
    (["--out", "tiny.txt/x.model", "--data", "enough.txt", "--size", "520"], ["tiny.txt/x.model"]),
]


@pytest.mark.parametrize("args, words", REFUSED, ids=[" ".join(args) for args, _ in REFUSED])
def test_bad_input_is_one_line_and_writes_nothing(command, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("abc")
    (tmp_path / "enough.txt").write_text(" ".join(TEXTS[1:3] * 9))
    (tmp_path / "here.model").write_text("mine")
    code, _, errors = command(*args)
    assert code == 2
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.txt", "enough.txt", "here.model"}
    assert (tmp_path / "here.model").read_text() == "mine"


def test_a_file_that_goes_away_is_named(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("some words " * 500)
    corpus = load_corpus(str(tmp_path))
    for name in "ab":
        (tmp_path / f"{name}.txt").unlink()
    with pytest.raises(UserError, match=r"cannot be read any more"):
        train_bpe(corpus, 600)


def test_names_that_may_be_written(tmp_path):
    check_output(tmp_path / "new.model")
    with pytest.raises(UserError, match="suffix ''"):
        check_output(tmp_path / "new")
