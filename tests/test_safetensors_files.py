"""Safetensors folders: the library agrees in both directions; every bad input is one line that names it."""

import json
import os
import pickle
import resource
import struct
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from k3jax.errors import UserError
from k3jax.safetensors_files import INDEX, SafetensorsFolder, write_file, write_index
from k3jax.safetensors_header import MAX_HEADER, dtype_of, header_of, name_of
from tests.golden_io import golden_dir

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def some_tensors():
    rng = np.random.default_rng(0)
    return {
        "b.weight": rng.normal(size=(4, 6)).astype(np.float32),
        "a.weight": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(2.5),
        "packed": rng.integers(0, 256, (2, 3), dtype=np.uint8),
        "empty": np.zeros((0, 7), np.float16),
    }


def kinds(tensors):
    return {name: (name_of(np.asarray(x).dtype), np.shape(x)) for name, x in tensors.items()}


def write(path, tensors, metadata=None):
    write_file(path, kinds(tensors), lambda name: np.asarray(tensors[name]), metadata)


def raw(path, header, data=b"", length=None):
    """A file from a header given as object or bytes, and the payload."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def folder(tmp_path):
    """A good model of two shards; the cases break it."""
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    write(tmp_path / ONE, {"a": np.arange(2, dtype=np.float32), "b": np.ones((2, 2), np.float32)})
    write(tmp_path / TWO, {"c": np.zeros(3, np.uint8)})
    write_index(tmp_path / INDEX, {"a": ONE, "b": ONE, "c": TWO}, 27)
    return tmp_path


def single(folder, header, data=b"", length=None):
    """Makes the model one file with this header."""
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    raw(folder / "model.safetensors", header, data, length)


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    for key, value in changes.items():
        index[key] = value
    (folder / INDEX).write_text(json.dumps(index))


def place(folder, **places):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_index(folder, weight_map={k: v for k, v in (weight_map | places).items() if v is not None})


def link_out(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / TWO).rename(outside)
    (folder / TWO).symlink_to(outside)


def only_pickle(folder, name):
    for path in (ONE, TWO, INDEX):
        (folder / path).unlink()
    (folder / name).write_bytes(pickle.dumps({"a": 1}))


# -- good files


def test_the_library_reads_what_is_written(tmp_path):
    tensors, path = some_tensors(), tmp_path / "m.safetensors"
    told = []
    metadata = {"format": "np", "note": "Größe"}
    write_file(
        path, kinds(tensors), lambda n: np.asarray(tensors[n]), metadata, on_bytes=told.append
    )
    assert sum(told) == sum(np.asarray(x).nbytes for x in tensors.values())
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for name, want in tensors.items():
        assert back[name].dtype == np.asarray(want).dtype
        np.testing.assert_array_equal(back[name], want)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == metadata
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0
    assert not list(tmp_path.glob("*.part"))


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {name: np.asarray(x) for name, x in some_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    folder = SafetensorsFolder(str(tmp_path))
    assert folder.metadata == {"model.safetensors": {"format": "pt"}}
    assert folder.tensors.keys() == tensors.keys()
    assert folder.total_bytes == sum(x.nbytes for x in tensors.values())
    begins = [info.begin for info in folder.tensors.values()]
    assert begins == sorted(begins)
    for name, want in tensors.items():
        got = folder.read(name)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        assert folder.read_bytes(name, 0, want.nbytes) == want.tobytes()
        assert folder.read_bytes(name, want.nbytes // 2, want.nbytes) == want.tobytes()[want.nbytes // 2 :]  # fmt: skip
    with pytest.raises(ValueError, match="bytes 0:7 of 'packed', which has 6"):
        folder.read_bytes("packed", 0, 7)


@pytest.mark.golden
def test_the_golden_checkpoint_is_reproduced_to_the_byte(tmp_path):
    checkpoint = golden_dir() / "multimodal" / "checkpoint"
    folder = SafetensorsFolder(str(checkpoint))
    assert len(folder.tensors) == 344
    assert folder.total_bytes == 669_344
    assert folder.others == ["config.json"]
    for file in folder.files:
        here = {n: (i.dtype, i.shape) for n, i in folder.tensors.items() if i.file == file}
        write_file(tmp_path / file, here, folder.read, folder.metadata[file])
        assert (tmp_path / file).read_bytes() == (checkpoint / file).read_bytes()


def test_any_file_system_of_fsspec_is_a_source(folder):
    memory = fsspec.filesystem("memory")
    memory.put(f"{folder}/", "/models/toy/", recursive=True)
    try:
        found = SafetensorsFolder("memory://models/toy")
        np.testing.assert_array_equal(found.read("b"), np.ones((2, 2), np.float32))
        found.copy_small("config.json", folder / "copy.json")
        assert (folder / "copy.json").read_text() == '{"model_type": "toy"}'
        assert not list(folder.glob("*.part"))
    finally:
        memory.rm("/models", recursive=True)


def test_headers_alone_are_enough_without_payload(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(
        header_of({"huge": ("BF16", (10**6, 10**6))}, None)
    )
    folder = SafetensorsFolder(str(tmp_path), payload=False)
    assert folder.total_bytes == 2 * 10**12
    with pytest.raises(UserError, match=r"model\.safetensors has .* bytes, .*: truncated"):
        SafetensorsFolder(str(tmp_path))
    with pytest.raises(UserError, match=r"model\.safetensors gave 0 bytes"):
        folder.read_bytes("huge", 0, 10)


def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(folder):
    """huggingface_hub stores a file once, by its hash, and links snapshots to it."""
    snapshot, blobs = folder / "models--x" / "snapshots" / "abc", folder / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate((ONE, TWO, INDEX, "config.json")):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    np.testing.assert_array_equal(SafetensorsFolder(str(snapshot)).read("a"), [0, 1])


def test_dtype_names_are_those_of_numpy_and_back():
    for name in ("F32", "BF16", "F16", "U8", "I64", "BOOL", "F8_E4M3"):
        assert name_of(dtype_of(name)) == name
    assert name_of(np.dtype("float32")) == "F32"


# -- bad input: (what is broken, words of the one line)

OVER = [{"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)]
GAP = [{"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)]

CASES = {
    "truncated shard": (
        lambda f: os.truncate(f / ONE, (f / ONE).stat().st_size - 1),
        f"{ONE} has .* truncated",
    ),
    "surplus bytes": (
        lambda f: (f / ONE).write_bytes((f / ONE).read_bytes() + b"x"),
        f"{ONE} has .* surplus bytes at its end",
    ),
    "no room for a length": (lambda f: os.truncate(f / ONE, 5), f"{ONE} has 5 bytes: truncated"),
    "empty file": (lambda f: os.truncate(f / ONE, 0), f"{ONE} has 0 bytes: truncated"),
    "truncated header": (
        lambda f: os.truncate(f / ONE, 30),
        f"{ONE} claims a header of .* bytes; the file has 30",
    ),
    "header of 10 GB": (
        lambda f: single(f, b"{}", length=10**10),
        r"model\.safetensors claims a header of 10,000,000,000 bytes",
    ),
    "header over the limit": (
        lambda f: (
            single(f, b"{}", length=MAX_HEADER + 1),
            os.truncate(f / "model.safetensors", 10**9),
        ),
        "claims a header of 100,000,001 bytes; the file has 1,000,000,000 and the limit is 100,000",
    ),
    "header no JSON": (lambda f: single(f, b"{nonsense"), r"model\.safetensors is no JSON: Expect"),
    "header no text": (
        lambda f: single(f, b'{"\xff": 1}'),
        r"model\.safetensors is no JSON: 'utf-8'",
    ),
    "header too deep": (
        lambda f: single(f, b"[" * 10**6),
        r"model\.safetensors is no JSON: maximum",
    ),
    "header a list": (
        lambda f: single(f, b"[1]"),
        r"model\.safetensors is no JSON object but '\[1\]'",
    ),
    "header with NaN": (lambda f: single(f, b'{"a": NaN}'), "has the number NaN"),
    "name twice in a header": (
        lambda f: single(f, b'{"a": {}, "a": {}}'),
        r"header of .*model\.safetensors has 'a' twice",
    ),
    "metadata no strings": (
        lambda f: single(f, {"__metadata__": {"x": 1}}),
        "__metadata__ must map strings to strings",
    ),
    "entry no object": (
        lambda f: single(f, {"a": 3}),
        "'a' needs dtype, shape and two data_offsets",
    ),
    "entry without shape": (
        lambda f: single(f, {"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
        "'a' needs dtype, shape and two data_offsets",
    ),
    "three offsets": (
        lambda f: single(f, {"a": entry(offsets=(0, 4, 8))}),
        "'a' needs dtype, shape and two data_offsets",
    ),
    "endless name": (
        lambda f: single(f, {"a" * 10**6: entry()}),
        "aaa'... is a name of 1,000,000 characters",
    ),
    "unknown dtype": (
        lambda f: single(f, {"a": entry("F13")}),
        "'a' has dtype 'F13'; known are BOOL",
    ),
    "dtype no string": (lambda f: single(f, {"a": entry(["F32"])}), r"'a' has dtype \['F32'\]"),
    "negative size": (
        lambda f: single(f, {"a": entry(shape=(-1, -2))}),
        r"'a' has shape \[-1, -2\]",
    ),
    "fractional size": (lambda f: single(f, {"a": entry(shape=(2.0,))}), r"'a' has shape \[2.0\]"),
    "size true": (lambda f: single(f, {"a": entry(shape=(True, 2))}), r"'a' has shape \[True, 2\]"),
    "shape no list": (
        lambda f: single(f, {"a": entry() | {"shape": "2"}}),
        "'a' has shape 2: not a list of sizes",
    ),
    "product over 64 bits": (
        lambda f: single(f, {"a": entry(shape=(2**62, 4))}),
        "'a' has 8 bytes, which is not F32 of shape",
    ),
    "size over 64 bits": (lambda f: single(f, {"a": entry(shape=(10**30, 0))}), "'a' has shape"),
    "too many dimensions": (lambda f: single(f, {"a": entry(shape=[2**40] * 50)}), "'a' has shape"),
    "shape against bytes": (
        lambda f: single(f, {"a": entry(shape=(3,))}, bytes(8)),
        r"'a' has 8 bytes, which is not F32 of shape \[3\]",
    ),
    "negative offset": (lambda f: single(f, {"a": entry(offsets=(-8, 0))}), "'a' has data_offsets"),
    "offsets reversed": (lambda f: single(f, {"a": entry(offsets=(8, 0))}), "'a' has data_offsets"),
    "overlap": (lambda f: single(f, *OVER), "'b' begins at 4, not at 8: it overlaps"),
    "gap": (lambda f: single(f, *GAP), "'b' begins at 12, not at 8: it leaves a gap"),
    "gap at the start": (
        lambda f: single(f, {"a": entry(offsets=(8, 16))}, bytes(16)),
        "'a' begins at 8, not at 0",
    ),
    "same name in two shards": (
        lambda f: write(f / TWO, {"c": np.zeros(3, np.uint8), "a": np.zeros(2, np.float32)}),
        f"'a' is both in .*{ONE} and in {TWO}",
    ),
    "index names a parent": (
        lambda f: place(f, c="../x.safetensors"),
        "'../x.safetensors', outside",
    ),
    "index names an absolute path": (
        lambda f: place(f, c="/etc/x.safetensors"),
        "'/etc/x.safetensors', outside the folder",
    ),
    "index names a URL": (
        lambda f: place(f, c="https://host/x.safetensors"),
        "'https://host/x.safetensors', outside the folder",
    ),
    "index names a path of Windows": (
        lambda f: place(f, c="..\\x.safetensors"),
        "outside the folder",
    ),
    "link out of the folder": (link_out, f"{TWO} is a link to .*outside.safetensors, outside"),
    "absent shard": (lambda f: (f / TWO).unlink(), f"{TWO} is named in {INDEX} but absent"),
    "index names a pickle": (
        lambda f: place(f, c="model.bin"),
        "'model.bin', which is no safetensors",
    ),
    "index names no string": (lambda f: place(f, c=3), "'3', which is no safetensors file"),
    "index name absent": (lambda f: place(f, d=TWO), f"places 'd' in {TWO}, which lacks it"),
    "index name elsewhere": (lambda f: place(f, b=TWO), f"places 'b' in {TWO}; it lies in {ONE}"),
    "surplus tensor": (lambda f: place(f, b=None), f"{ONE} has 'b', which .*{INDEX} lacks"),
    "surplus shard": (lambda f: write(f / "x.safetensors", {}), f"x.safetensors is not in {INDEX}"),
    "index without map": (lambda f: edit_index(f, weight_map=None), "has no weight_map"),
    "index of an empty map": (lambda f: edit_index(f, weight_map={}), "has no weight_map"),
    "index no JSON": (lambda f: (f / INDEX).write_text("{"), f"{INDEX} is no JSON"),
    "index name twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'),
        f"{INDEX} has 'a' twice",
    ),
    "total_size wrong": (
        lambda f: edit_index(f, metadata={"total_size": 28}),
        "total_size is 28, the tensors have 27 bytes",
    ),
    "total_size missing": (
        lambda f: edit_index(f, metadata={}),
        "total_size is None, not a number",
    ),
    "no index metadata": (
        lambda f: edit_index(f, metadata=None),
        "total_size is None, not a number",
    ),
    "total_size NaN": (
        lambda f: edit_index(f, metadata={"total_size": float("nan")}),
        f"{INDEX} has the number NaN",
    ),
    "total_size infinite": (
        lambda f: (f / INDEX).write_text(
            (f / INDEX).read_text().replace('"total_size": 27', '"total_size": 1e999')
        ),
        "total_size is inf, not a number of bytes",
    ),
    "no tensors": (
        lambda f: single(f, {"__metadata__": {}}),
        "holds no tensors in model.safetensors",
    ),
    "pickle .bin": (lambda f: only_pickle(f, "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "pickle .pt": (lambda f: only_pickle(f, "model.pt"), "model.pt is a pickle.*safetensors"),
    "no files": (lambda f: only_pickle(f, "notes.txt"), r"has no \*\.safetensors file"),
    "several files without index": (
        lambda f: (f / INDEX).unlink(),
        f"2 safetensors files but no {INDEX}",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is absent"),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("model: x"),
        "config.json is no JSON",
    ),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json is no JSON object",
    ),
    "config a folder": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        "config.json is unreadable",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_kf_088_bad_input_is_one_line(folder, case):
    broken, words = CASES[case]
    assert SafetensorsFolder(str(folder)).total_bytes == 27
    broken(folder)
    with pytest.raises(UserError, match=words) as error:
        SafetensorsFolder(str(folder))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("absent", "absent does not exist"),
        ("model.bin", r"model\.bin is a pickle"),
        ("notes.txt", r"notes\.txt is a file: give the folder"),
    ],
)
def test_a_path_that_is_no_folder(tmp_path, path, words):
    (tmp_path / "model.bin").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=words):
        SafetensorsFolder(str(tmp_path / path))


def test_an_unknown_protocol_is_named():
    with pytest.raises(UserError, match=r"nosuch://x cannot be opened: .*nosuch"):
        SafetensorsFolder("nosuch://x")


def test_an_empty_folder_has_no_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json is absent"):
        SafetensorsFolder(str(tmp_path))


def test_a_claimed_size_is_not_allocated(folder):
    """The file really has 4 TB (of holes), the header claims 100 MB and more: refused by its number."""
    single(folder, b"{}", length=2**63)
    os.truncate(folder / "model.safetensors", 2**42)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="claims a header"):
        SafetensorsFolder(str(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


# -- writing


def test_a_wrong_array_is_a_defect_and_leaves_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(ValueError, match=r"'a' is float32 \(2,\), not BF16 \(2,\)") as error:
        write_file(path, {"a": ("BF16", (2,))}, lambda _: np.zeros(2, np.float32), None)
    assert not isinstance(error.value, UserError)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_source_is_told_as_its_own(tmp_path):
    """An array that cannot be read is not blamed on the file being written."""

    def broken(_):
        raise UserError("source unreadable: [Errno 2] gone")

    with pytest.raises(UserError, match=r"^source unreadable"):
        write_file(tmp_path / "m.safetensors", {"a": ("F32", (2,))}, broken, None)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"m\.safetensors not written: No such file"):
        write(tmp_path / "absent" / "m.safetensors", {"a": np.zeros(2, np.float32)})


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"m\.safetensors not written: No space left .* free some"):
        write(path, {"a": np.zeros(2, np.float32)})
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
