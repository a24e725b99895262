"""Tokenizers: ids, decoding, streaming, and files that are not what they should be."""

import base64
import json
import os
from concurrent import futures

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from k3jax.configs import preset
from k3jax.data.tiktoken_bpe import K3_SPLIT, cut_long
from k3jax.data.tokenizer import MODELS_OWN, ByteTokenizer, check_vocabulary, load_tokenizer
from k3jax.errors import UserError

TEXTS = [
    "",
    "def f(x):\n\treturn x  # tab\r\n",
    "中文abc 漢字かな交じり 한국어",
    "naïve café Ωμέγα עברית العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f600",
    "0 12 345 6789 ١٢٣ ½",
    '<|open|>message role="user"<|sep|>[BOS][EOS]<|end_of_msg|></s><s>',
    "NUL \x00 and BOM \ufeff inside",
    "What's can't I'LL they'd",
]

# Ids of the released vocabulary (163,584 ranks) for single pieces of the split pattern.
RELEASED = {
    "What's": [58434],
    "100": [1570],
    "1234567890": [6694, 12972, 16242, 15],
    "can't": [58809],
    "fooBAR": [10570, 44894],
    "中文abc": [16717, 8497],
    "think": [39964],
    "response": [12092],
    "message": [2778],
}
PIECES = {
    58434: "What's",
    1570: "100",
    6694: "123",
    12972: "456",
    16242: "789",
    58809: "can't",
    10570: "foo",
    44894: "BAR",
    16717: "中文",
    8497: "abc",
    39964: "think",
    12092: "response",
    2778: "message",
}


def single_bytes():
    """The 256 bytes in the order that byte-level vocabularies give them ranks."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [bytes([b]) for b in [*plain, *(b for b in range(256) if b not in plain)]]


def write_ranks(path, tokens):
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def released_size(tmp_path_factory):
    """163,584 ranks: the bytes, the pieces above at their released ids, and filler."""
    tokens = single_bytes()
    for rank in range(256, 163_584):
        filler = b"\xff" + rank.to_bytes(3, "big") + b"\xff"
        tokens.append(PIECES[rank].encode() if rank in PIECES else filler)
    return load_tokenizer(write_ranks(tmp_path_factory.mktemp("k3") / "tiktoken.model", tokens))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A trained byte-level BPE with everything in its JSON that must not touch documents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for text in TEXTS if "<" not in text] + ["</"] * 20
    tokenizer.train_from_iterator(texts * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64, pad_id=ord("a"))
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def word_level(tmp_path_factory):
    """Words; the controls are words of the vocabulary too, and decoding joins with spaces."""
    words = ["[UNK]", "<s>", "</s>", "<", "s>", "/s>", "the", "cat", "naïve"]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture(params=["bytes", "tiktoken", "byte_level"])
def lossless(request, released_size, byte_level):
    return {"bytes": ByteTokenizer(), "tiktoken": released_size, "byte_level": byte_level}[
        request.param
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(lossless, text):
    ids = lossless.encode(text)
    assert lossless.decode(ids) == text
    np.testing.assert_array_equal(lossless.encode_bytes(text.encode()), ids)
    assert lossless.encode_bytes(text.encode()).dtype == np.int32
    assert not set(ids) & {*lossless.specials.values()}
    assert not lossless.token_bytes()[[*lossless.specials.values()]].any()
    assert int(lossless.token_bytes()[ids].sum()) == len(text.encode())


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(0, 258), max_size=30))
def test_stream_equals_decode(ids):
    tokenizer = ByteTokenizer()
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


def test_stream_holds_back_half_a_character():
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "é!".encode()] == ["", "é", "!"]
    assert stream.push(0xE4) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["released_size", "byte_level", "word_level"])
def test_stream_equals_decode_for_files(request, kind):
    tokenizer = request.getfixturevalue(kind)
    ids = [i for text in TEXTS for i in tokenizer.encode(text)] + [tokenizer.eos_id]
    stream = tokenizer.stream()
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == tokenizer.decode(ids)


def test_byte_ids_and_sizes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.size) == (
        *(256, 257, 258),
        259,
    )
    np.testing.assert_array_equal(tokenizer.token_bytes(), [1] * 256 + [0, 0, 0])
    assert tokenizer.decode([256, 104, 257]) == "<|bos|>h<|eos|>"


def test_surrogates_have_bytes(lossless):
    assert lossless.decode(lossless.encode("a\ud800b")) == "a\ufffdb"
    assert lossless.decode(lossless.encode("\ud83d\ude00")) == "\U0001f600"


@pytest.mark.parametrize("text, ids", RELEASED.items())
def test_kf_086_released_ids(released_size, text, ids):
    """The split pattern puts the released vocabulary's pieces where the official ids say."""
    assert released_size.encode(text) == ids


@pytest.mark.golden
def test_kf_086_ids_of_the_released_file(released_size):
    """With the file that K3JAX_TIKTOKEN names, ids; without it, as many pieces as the ids allow."""
    expected = RELEASED | {
        "get_weather": [618, 21_055, 2800],
        "XMLHttpRequest": [19_962, 9928, 3188],
        "newlines": [3514, 11_541],
    }
    path = os.environ.get("K3JAX_TIKTOKEN")
    tokenizer = load_tokenizer(path) if path else released_size
    for text, ids in expected.items():
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(regex.findall(f"(?V1){K3_SPLIT}", text)) <= len(ids)
        if path:
            assert tokenizer.encode(text) == ids
    assert tokenizer.size == preset("kimi_k3")().model.vocab_size == 163_840


def test_kf_086_controls_are_recognised_only_where_asked(released_size):
    text = "<|close|>think<|sep|>"
    assert released_size.encode_controls(text) == [163_588, 39_964, 163_589]
    assert released_size.encode_controls("think") == [39_964]
    assert released_size.encode_controls("<|open|>[EOS]") == [163_587, 163_585]
    assert released_size.decode(released_size.encode(text)) == text
    assert max(released_size.encode(text)) < 163_584


@pytest.mark.parametrize("text", TEXTS)
def test_controls_round_trip(lossless, text):
    assert lossless.decode(lossless.encode_controls(text)) == text


def test_controls_of_other_tokenizers(byte_level):
    assert byte_level.encode_controls("a</s>") == [*byte_level.encode("a"), byte_level.eos_id]
    assert ByteTokenizer().encode_controls("a<|eos|><|x") == [97, 257, *b"<|x"]


def test_kf_086_last_rank_specials_and_out_of_range(released_size):
    assert released_size.size == 163_840
    assert released_size.decode([163_583]) != ""
    assert released_size.decode([163_584, 163_585, 163_587, 163_839]) == "[BOS][EOS]<|open|>[PAD]"
    assert released_size.decode([163_592]) == "<|reserved_token_163592|>"
    assert released_size.specials["<osagent_mode>"] == 163_649
    assert (released_size.bos_id, released_size.eos_id) == (163_584, 163_585)
    assert released_size.pad_id == 163_839
    assert len(released_size.specials) == 256
    for token in (163_840, -1):
        with pytest.raises(ValueError, match=rf"id {token} is outside 0\.\.163839"):
            released_size.decode([token])
    assert int(released_size.token_bytes()[163_584:].sum()) == 0


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("XMLHttpRequest", ["XMLHttp", "Request"]),
        ("get_weather", ["get", "_weather"]),
        ("don't DON'T it's", ["don't", " DON'T", " it's"]),
        ("漢字kana漢", ["漢字", "kana", "漢"]),
        ("x12345", ["x", "123", "45"]),
        ("a == b;\r\n  c", ["a", " ==", " b", ";\r\n", " ", " c"]),
        ("end   \n\n  x", ["end", "   \n\n", " ", " x"]),
        ("tail   ", ["tail", "   "]),
        ("\tx", ["\tx"]),
        ("ЁЛКА Ёлка", ["ЁЛКА", " Ёлка"]),
    ],
)
def test_kf_086_split_pattern(text, pieces):
    assert regex.findall(f"(?V1){K3_SPLIT}", text) == pieces


def test_specials_follow_a_smaller_rank_file(tmp_path):
    tokenizer = load_tokenizer(write_ranks(tmp_path / "small.tiktoken", [*single_bytes(), b"ab"]))
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.size) == (257, 512, 513)
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode([257 + 8]) == "<|reserved_token_265|>"


def naive_cut(text, max_piece, max_run):
    for start in range(0, len(text), max_piece):
        part, begin, run, space = text[start : start + max_piece], 0, 0, None
        for i, letter in enumerate(part):
            run = run + 1 if letter.isspace() == space else 1
            space = letter.isspace()
            if run > max_run:
                yield part[begin:i]
                begin, run = i, 1
        yield part[begin:]


@settings(deadline=None, max_examples=100)
@given(text=st.text("ab \n\u3000", max_size=60))
def test_long_inputs_are_cut_as_specified(text):
    assert list(cut_long(text, 20, 4)) == list(naive_cut(text, 20, 4))


def test_long_runs_are_encoded(released_size):
    text = "a" * 60_000 + " " * 30_000 + "ab " * 1000
    assert [len(part) for part in cut_long(text)] == [25_000, 25_000, 35_000, 8_000]
    assert released_size.decode(released_size.encode(text)) == text


def test_template_truncation_and_padding_are_off(byte_level):
    ids = byte_level.encode("a much longer text than four tokens")
    assert len(ids) > 4
    assert not set(ids) & {byte_level.bos_id, byte_level.eos_id, byte_level.pad_id}
    assert (byte_level.bos_id, byte_level.eos_id, byte_level.pad_id) == (0, 1, 2)


def test_control_names_are_encoded_like_other_text(byte_level):
    assert [byte_level.piece(i) for i in byte_level.encode("</s>")] == [b"</", b"s", b">"]


def test_control_words_of_a_word_vocabulary_stay_text(word_level):
    ids = word_level.encode("the <s> cat </s> dog")
    assert not set(ids) & {word_level.bos_id, word_level.eos_id}
    assert word_level.decode(ids) == "the < s> cat < /s> [UNK]"
    assert word_level.token_bytes() is None
    with pytest.raises(ValueError, match=r"id 9 is outside 0\.\.8"):
        word_level.decode([9])


def test_normalised_text_has_no_byte_counts(tmp_path, byte_level):
    spec = json.loads(byte_level._inner.to_str())
    spec["normalizer"] = json.loads(normalizers.Lowercase().__getstate__())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert load_tokenizer(str(path)).token_bytes() is None


def test_roles_from_the_config_file(tmp_path, byte_level):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level._inner.to_str())
    roles = {"bos_token": None, "eos_token": {"content": "<pad>"}, "pad_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    tokenizer = load_tokenizer(str(tmp_path))  # the folder
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 2, 1)
    assert tokenizer.fingerprint != byte_level.fingerprint


def test_kf_114_threads_after_use_in_the_parent(released_size, byte_level):
    for tokenizer in (released_size, byte_level):
        expected = tokenizer.encode("some text " * 200)
        with futures.ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(tokenizer.encode, "some text " * 200) for _ in range(8)]
            assert [job.result(timeout=60) for job in jobs] == [expected] * 8


BAD_FILES = {
    "missing.json": (None, "is not a file"),
    "vocab.bin": (b"x", "suffix '.bin'"),
    "broken.json": (b"{", "is not JSON"),
    "list.json": (b"[]", "holds a JSON list"),
    "no_model.json": (b"{}", "not a valid tokenizer.json"),
    "sentencepiece.model": (b"\n\x0e\n\x05<unk>\x15\x00", "line 2 is no 'base64 rank' pair"),
    "text.tiktoken": (b"IQ== 0\n!! 1\n", "line 2 is no 'base64 rank' pair"),
    "gap.tiktoken": (b"IQ== 0\nIg== 2\n", "ranks are not 0..1"),
    "twice.tiktoken": (b"IQ== 0\nIQ== 1\n", "ranks are not 0..0"),
    "few.tiktoken": (b"IQ== 0\n", "lacks 255 of the 256 single bytes, first 0x00"),
    "empty.tiktoken": (b"", "lacks 256 of the 256"),
}


@pytest.mark.parametrize("spec", ["", "gpt2", "x" * 5000])
def test_bad_names(spec):
    with pytest.raises(UserError, match="is not a file or holds none; give 'bytes'"):
        load_tokenizer(spec)


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path, name):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(str(tmp_path / name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_end_token(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"no token known to end a document.*eos_token"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_larger_than_the_vocabulary():
    check_vocabulary(ByteTokenizer(), 259)
    with pytest.raises(UserError, match=r"259 ids, vocab_size is 258.*--model.vocab-size 259"):
        check_vocabulary(ByteTokenizer(), 258)
    with pytest.raises(UserError, match=r"is 258; give the model's own with --tokenizer FILE$"):
        check_vocabulary(ByteTokenizer(), 258, fix=MODELS_OWN)
