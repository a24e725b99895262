"""Files to documents: formats, what is skipped or refused, and the split."""

import json
import logging
import os
from pathlib import Path

import array_record.python.array_record_module as array_record
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3jax.data import formats
from k3jax.data.text import load_corpus
from k3jax.errors import UserError

DOCUMENTS = ["alpha", "β\r\n\x00 second line\n", "中文", "x", "tail without line end"]


def write_array_record(path, records):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_parquet(path, texts, **options):
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, **options)


def read_all(corpus, name="all"):
    split = corpus.split(name)
    return [split[i] for i in range(len(split))]


def texts_of(corpus, name="all"):
    return sorted(d.data.decode() for d in read_all(corpus, name) if d is not None)


def make(folder, kind):
    if kind == "files":
        for i, text in enumerate(DOCUMENTS):
            (folder / f"{i}{['.txt', '.md', '.py'][i % 3]}").write_bytes(text.encode())
    elif kind == "jsonl":
        write_jsonl(folder / "a.jsonl", DOCUMENTS[:2])
        write_jsonl(folder / "b.jsonl", DOCUMENTS[2:])
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", DOCUMENTS, row_group_size=2)
    elif kind == "array_record":
        write_array_record(folder / "a.array_record", [text.encode() for text in DOCUMENTS])
    elif kind == "array_record_json":
        records = [json.dumps({"text": text}).encode() for text in DOCUMENTS]
        write_array_record(folder / "a.array_record", records)


@pytest.mark.parametrize("kind", ["files", "jsonl", "parquet", "array_record", "array_record_json"])
@pytest.mark.parametrize("how", ["folder", "glob"])
def test_every_format_gives_the_same_documents(tmp_path, kind, how):
    make(tmp_path, kind)
    data = str(tmp_path) if how == "folder" else str(tmp_path / "*")
    corpus = load_corpus(data, strict=True)
    assert texts_of(corpus) == sorted(DOCUMENTS)
    assert all(d.first and d.last for d in read_all(corpus))
    assert sorted(texts_of(corpus, "train") + texts_of(corpus, "validation")) == sorted(DOCUMENTS)
    assert len(corpus.split("validation")) == 1


def test_library_is_the_default():
    corpus = load_corpus()
    assert len(corpus.files) > 300
    assert "os.py" in corpus.files
    assert all(f.endswith(".py") and "/test" not in f and "site-packages" not in f
               for f in corpus.files if not f.startswith("unittest"))  # fmt: skip
    train, held_out = corpus.split("train"), corpus.split("validation")
    assert not set(train._file) & set(held_out._file)
    assert len(set(train._file) | set(held_out._file)) == len(corpus.files)
    assert 0.01 < len(held_out) / (len(train) + len(held_out)) < 0.12
    assert corpus.describe().startswith(f"data Python standard library: {len(corpus.files)} files")
    again = load_corpus()
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(again._order, corpus._order)


def make_many(folder, count):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"document {i}")
    return str(folder)


def test_split_by_file_is_stable(tmp_path):
    before = load_corpus(make_many(tmp_path / "here", 200))
    elsewhere = load_corpus(make_many(tmp_path / "there", 200))
    assert before.by_file
    assert before.fingerprint == elsewhere.fingerprint
    held_out = texts_of(before, "validation")
    assert held_out == texts_of(elsewhere, "validation")
    assert 2 <= len(held_out) <= 25
    after = load_corpus(make_many(tmp_path / "here", 260))
    assert set(held_out) <= set(texts_of(after, "validation"))
    assert not set(held_out) & set(texts_of(after, "train"))
    assert after.fingerprint != before.fingerprint


def test_fingerprint_sees_sizes(tmp_path):
    data = make_many(tmp_path, 3)
    before = load_corpus(data).fingerprint
    (tmp_path / "001.txt").write_text("document one")
    assert load_corpus(data).fingerprint != before


def test_split_by_document_for_few_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(400)])
    corpus = load_corpus(str(tmp_path / "a.jsonl"))
    held_out = texts_of(corpus, "validation")
    assert 8 <= len(held_out) <= 40
    assert not set(held_out) & set(texts_of(corpus, "train"))
    # neighbours in the file are not neighbours in the split's order
    order = [int(d.data.split()[1]) for d in read_all(corpus, "validation")]
    assert order != sorted(order)


def test_runs_of_documents_share_a_unit(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(403)])
    monkeypatch.setattr("k3jax.data.text.MAX_UNITS", 100)
    corpus = load_corpus(str(tmp_path))
    assert len(corpus.unit_start) <= 101
    assert len(texts_of(corpus)) == 403
    assert set(corpus.unit_size[:-1]) == {5}
    assert texts_of(corpus, "train") + texts_of(corpus, "validation") != texts_of(corpus, "train")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"line {i} é中" for i in range(2000)),
        "é中" * 8000,
        "\r\n".join("x" * (i % 90) for i in range(600)),
        "x" * 2047,
        "x" * 3000 + "\n",
        "\n" * 5000,
    ],
)
def test_long_text_is_read_in_pieces(tmp_path, text):
    (tmp_path / "long.txt").write_bytes(text.encode())
    size = len(text.encode())
    for piece_bytes in (1024, 4096, 10**9):
        reader = formats.PlainText(tmp_path / "long.txt", piece_bytes)
        pieces = [reader[i] for i in range(len(reader))]
        assert len(pieces) == max(1, size // piece_bytes)
        assert b"".join(p.data for p in pieces) == text.encode()
        assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(len(p.data) < 3 * piece_bytes for p in pieces)
        if "line" in text:
            assert all(p.data.endswith(b"\n") for p in pieces[:-1])
        for piece in pieces:
            piece.data.decode()


def test_a_single_small_file_still_has_a_validation_split(tmp_path):
    (tmp_path / "input.txt").write_text("to be or not to be\n" * 2000)  # 38 kB
    corpus = load_corpus(str(tmp_path / "input.txt"))
    train, held_out = read_all(corpus, "train"), read_all(corpus, "validation")
    assert len(train) >= 15
    assert held_out
    assert sum(len(d.data) for d in train + held_out) == 38_000


def test_byte_order_mark_and_empty_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "first"}\n{"text": ""}\n')
    corpus = load_corpus(str(tmp_path), strict=True)
    assert corpus.files == ("a.txt", "d.jsonl")
    assert texts_of(corpus) == ["first", "marked"]


def test_json_lines_oddities(tmp_path, caplog):
    lines = [
        b"",
        b'{"text": "one", "other": 1}\r',
        b"  ",
        b"{not json",
        b'{"body": "no text"}',
        b'{"text": 7}',
        b'["text"]',
        b'{"text": "bad \xff byte"}',
        b"[" * 100_000,
        rb'{"text": "lone \ud800 surrogate"}',
        '{"text": "line\u2028separator"}'.encode(),
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING, "k3jax"):
        split = load_corpus(str(tmp_path)).split("all")
        texts = [split[i].data.decode() for i in range(len(split)) if split[i] is not None]
    assert sorted(texts) == ["last", "line\u2028separator", "lone \ufffd surrogate", "one"]
    assert split.unreadable == {"a.jsonl": 6}
    assert len(caplog.messages) == 1
    assert "skipping documents of a.jsonl" in caplog.text
    with pytest.raises(UserError, match=r"'a.jsonl'.*no JSON in the line at byte 33; .*--strict"):
        load_corpus(str(tmp_path), strict=True)


def test_huge_single_line(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SCAN_BYTES", 1000)  # lines longer than the reading block
    texts = ["é" * 3000, "b" * 999, "c"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    assert texts_of(load_corpus(str(tmp_path))) == sorted(texts)
    (tmp_path / "b.txt").write_text("中" * 5000)
    assert formats.PlainText(tmp_path / "b.txt", 10**6)[0].data.decode() == "中" * 5000


def test_parquet_nulls_groups_and_cache(tmp_path, monkeypatch):
    texts = [None if i % 7 == 0 else f"row {i} " * 20 for i in range(100)]
    write_parquet(tmp_path / "a.parquet", texts, row_group_size=9)
    write_parquet(tmp_path / "b.parquet", ["dictionary"] * 3)
    monkeypatch.setattr(formats, "_table_cache", cache := formats._TableCache(4000))
    corpus = load_corpus(str(tmp_path))
    reader = corpus.readers[0]
    order = np.random.default_rng(0).permutation(100)
    for i in map(int, order):
        assert (reader[i] and reader[i].data.decode()) == texts[i]
    assert cache._used <= 4000
    assert cache._used == sum(column.nbytes for column in cache._columns.values())


def test_parquet_categories(tmp_path):
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts_of(load_corpus(str(tmp_path))) == ["a", "a", "b"]


def test_array_record_text_that_begins_with_a_brace(tmp_path):
    write_array_record(tmp_path / "a.array_record", [b"{ not json", b"", b'{"body": 1}', b"\xff"])
    split = load_corpus(str(tmp_path)).split("all")
    assert [d.data for d in (split[i] for i in range(4)) if d] == [b"{ not json"]
    assert split.unreadable == {"a.array_record": 2}


def damaged(folder, name):
    path = folder / name
    if name == "binary.txt":
        path.write_bytes(b"ok\xff\xfe")
    elif name == "cut.md":
        path.write_bytes("é".encode()[:1])
    elif name == "utf16.py":
        path.write_bytes("text".encode("utf-16"))
    elif name == "table.parquet":
        path.write_bytes(b"PAR1 not really")
    elif name == "column.parquet":
        pq.write_table(pa.table({"body": ["x"], "text": [1]}), path)
    elif name == "short.array_record":
        path.write_bytes(b"short")
    elif name == "half.array_record":
        write_array_record(path, [b"x"])
        path.write_bytes(path.read_bytes()[:65536])
    elif name == "lines.jsonl":
        path.write_bytes(b'{"body": "x"}\n')
    elif name == "dangling.txt":
        path.symlink_to(folder / "nowhere")
    elif name == "self.txt":
        path.symlink_to(path)
    elif name == "pipe.txt":
        os.mkfifo(path)


DAMAGED = {
    "binary.txt": "not UTF-8 near byte 2",
    "cut.md": "not UTF-8 near byte",
    "utf16.py": "not UTF-8 near byte 0",
    "table.parquet": "no parquet file",
    "column.parquet": 'no string column "text" among body: string, text: int64',
    "short.array_record": "no array_record file",
    "half.array_record": "no array_record file",
    "lines.jsonl": 'no string field "text"',
    "dangling.txt": "No such file",
    "self.txt": "symbolic links",
    "pipe.txt": "not a regular file",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_skipped_and_reported(tmp_path, name, caplog):
    damaged(tmp_path, name)
    with pytest.raises(UserError, match=f"no readable file: 1 skipped, first '{name}'") as caught:
        load_corpus(str(tmp_path))
    assert "\n" not in str(caught.value)
    make_many(tmp_path, 3)
    with caplog.at_level(logging.WARNING, "k3jax"):
        corpus = load_corpus(str(tmp_path))
    assert texts_of(corpus) == ["document 0", "document 1", "document 2"]
    assert len(corpus.skipped) == 1
    assert DAMAGED[name] in corpus.skipped[0][1]
    assert f"skipped 1 unreadable, first {name}" in corpus.describe()
    assert f"skipping {name}" in caplog.text
    with pytest.raises(
        UserError, match=f"'{name}'.*is unreadable: .*; repair it, or drop --strict"
    ):
        load_corpus(str(tmp_path), strict=True)


def test_permission_denied(tmp_path, monkeypatch):
    data = make_many(tmp_path, 3)
    real = Path.open

    def guarded(path, *args, **kwargs):
        if path.name == "001.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    corpus = load_corpus(data)
    monkeypatch.setattr(Path, "open", guarded)
    assert load_corpus(data).skipped == (("001.txt", "Permission denied"),)
    with pytest.raises(UserError, match=r"'001.txt'.*cannot be read any more \(Permission denied"):
        texts_of(corpus)  # it was readable when the run started


def test_folders_links_and_hidden_names(tmp_path):
    for name in ("a.txt", "sub/b.txt", "sub/deep/C.TXT", ".hidden/d.txt", ".e.txt", "sub/f.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "sub/loop").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "other/g.txt").write_text("other/g.txt")
    (tmp_path / "again.txt").symlink_to(tmp_path / "a.txt")
    everything = ["a.txt", "other/g.txt", "sub/b.txt", "sub/deep/C.TXT"]
    assert texts_of(load_corpus(str(tmp_path))) == everything
    assert texts_of(load_corpus(str(tmp_path / "*"))) == everything
    assert texts_of(load_corpus(str(tmp_path / "**/*.*"))) == everything
    assert texts_of(load_corpus(str(tmp_path / "sub/*.txt"))) == ["sub/b.txt"]
    assert texts_of(load_corpus(str(tmp_path / "linked"))) == ["other/g.txt"]


def test_names_with_glob_characters(tmp_path):
    (tmp_path / "a[1].txt").write_text("literal")
    (tmp_path / "a1.txt").write_text("pattern")
    assert texts_of(load_corpus(str(tmp_path / "a[1].txt"))) == ["literal"]
    (tmp_path / "a[1].txt").unlink()
    assert texts_of(load_corpus(str(tmp_path / "a[1].txt"))) == ["pattern"]


BAD_DATA = {
    "nowhere": "'{}' does not exist; give --data a file, folder or glob of .txt .md .py .jsonl",
    "*.txt": "'{}' matches no file; give --data",
    "x" * 5000: "does not exist; give --data",
    "table.csv": "'{}' has suffix '.csv'; supported are .txt",
    "noext": "'{}' has suffix ''; supported are",
    "folder": "'{}' has no file of a supported kind (0 others); supported are .txt",
    "others": "'{}' has no file of a supported kind (1 others)",
    "empty.txt": "'{}' is empty: 1 files, no document; add text",
    "empty.jsonl": "'{}' is empty",
    "empty.parquet": "'{}' is empty",
    "empty.array_record": "'{}' is empty",
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "others").mkdir()
    for file in ("table.csv", "noext", "others/table.csv"):
        (tmp_path / file).write_text("x")
    (tmp_path / "empty").mkdir()
    if name == "empty.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    elif name == "empty.array_record":
        write_array_record(tmp_path / name, [])
    elif name.startswith("empty"):
        (tmp_path / name).write_bytes(b"")
    data = str(tmp_path / name)
    with pytest.raises(UserError) as caught:
        load_corpus(data)
    assert BAD_DATA[name].format(data) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_argument_is_not_the_working_folder():
    with pytest.raises(UserError, match="data ' ' is no path; give a file"):
        load_corpus(" ")


def test_single_document_has_no_validation_split(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["only"])
    corpus = load_corpus(str(tmp_path))
    assert texts_of(corpus, "train") == ["only"]
    with pytest.raises(
        UserError, match=r"single document, so none can be held out.*--eval-every 0"
    ):
        corpus.split("validation")
