"""`k3jax generate`: prompts, chats, files of requests that a stopped process continues, and what it refuses."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from k3jax import cli, generate_jobs, run_dir
from k3jax.configs import preset
from k3jax.data.chat import encode_chat
from k3jax.data.chat_parser import parse
from k3jax.data.tokenizer import load_tokenizer
from k3jax.errors import UserError
from k3jax.generate import Engine
from k3jax.generate_jobs import Output, read_jobs
from k3jax.request import Request, Result
from k3jax.sample import SamplingConfig
from tests.data.chat_cases import small_tokenizer
from tests.model_helpers import build, split, tiny_config

MESSAGES = [{"role": "user", "content": "hi"}]
LINES = [
    {"id": "a", "prompt": "def f(", "max_tokens": 24},
    {"id": "b", "prompt": "x", "max_tokens": 5, "temperature": 0, "repetition_penalty": 1.3},
    {"prompt": "", "max_tokens": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 9},
    {"id": 7, "messages": MESSAGES, "max_tokens": 9, "thinking": False},
    {"id": "e", "messages": MESSAGES, "max_tokens": 12, "stop": ["zq", "qz"]},
    {"id": "f", "prompt": "def f(", "max_tokens": 40},
]
IDS = ["a", "b", 3, 7, "e", "f"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A random model with a small vocabulary that has K3's structural tokens."""
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("vocabulary"))
    cfg = tiny_config(vocab_size=tokenizer.size, num_layers=3)
    _, params, buffers = split(build(cfg))
    experiment = replace(preset("nano")(), model=cfg, tokenizer=tokenizer.name)
    return run_dir.Trained(experiment, 3, params, buffers)


@pytest.fixture
def command(capsys, monkeypatch, trained):
    """Runs the command in this process on that model; returns code, output, error text."""
    logger = logging.getLogger("k3jax")
    before = (logger.handlers[:], logger.level, logger.propagate)
    monkeypatch.setenv("K3JAX_CACHE_DIR", "")
    monkeypatch.setattr(run_dir, "load_trained", lambda path, step, mesh: trained)

    def run(*args):
        code = cli.main(["generate", "model", *map(str, args)])
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


def refused(result, *words):
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for word in words:
        assert word in err


def engine_of(trained, **sizes):
    tokenizer = load_tokenizer(trained.cfg.tokenizer)
    sizes = {"slots": 4, "max_len": 256} | sizes
    return Engine(trained.cfg.model, trained.params, trained.buffers, tokenizer, **sizes)


def jobs_file(tmp_path, lines=LINES):
    path = tmp_path / "in.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- one prompt, one chat


def test_prompt(command, trained):
    """The prompt and its continuation on stdout, as an engine gives it; the rate on stderr."""
    code, out, err = command(
        "--prompt", "def ", "--max-tokens", 40, "--seed", 5, "--temperature", 0.9, "--logprobs"
    )
    assert code == 0
    engine = engine_of(trained, slots=1)
    sampling = SamplingConfig(temperature=0.9)
    text = "".join(engine.stream_text("def ", max_tokens=40, seed=5, sampling=sampling))
    assert out == f"def {text}\n"
    assert "decode" in err
    assert "tokens/s" in err
    assert "nats per token" in err
    assert err.startswith("reading 4 tokens; the first time, this compiles\n")


def test_a_chat_that_never_ends_is_cut_off_and_says_so(command, tmp_path):
    """A model that does not close its answer: the room given ends it (stderr tells)."""
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES))
    code, _, err = command("--chat", path, "--max-tokens", 3, "--temperature", 0)
    assert code == 0
    assert "cut off after 3 tokens: --max-tokens gives room for more" in err


def test_stop_flag(command):
    _, whole, _ = command("--prompt", "a", "--max-tokens", 30, "--temperature", 0)
    stop = whole[6:9]
    _, out, _ = command("--prompt", "a", "--max-tokens", 30, "--temperature", 0, "--stop", stop)
    assert out == whole[: whole.index(stop, 1)] + "\n"


def test_chat(command, trained, tmp_path):
    """A file of messages, with options: what the parser makes of the answer."""
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": MESSAGES, "thinking": False}))
    code, out, _ = command("--chat", path, "--max-tokens", 20, "--temperature", 0)
    assert code == 0
    engine = engine_of(trained, slots=1)
    options = generate_jobs.chat_options({"thinking": False})
    ids = encode_chat(MESSAGES, engine.tokenizer, options).ids.tolist()
    stop = (engine.tokenizer.specials["<|end_of_msg|>"],)
    greedy = SamplingConfig(temperature=0.0)
    (want,) = engine.generate([Request(prompt=ids, max_tokens=20, sampling=greedy, stop_ids=stop)])
    assert out == parse(want.text, "response").content + "\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "holds no list of messages"),
        ('{"messages": [], "colour": 1}', "'colour'"),
        ('{"messages": [], "prompt": "a"}', "either prompt or messages"),
        ('{"messages": [], "thinking": "no"}', "thinking='no'"),
        ('[{"role": "user", "content": 3}]', "message"),
        ('{"messages": [], "effort": "medium"}', "medium"),
    ],
)
def test_bad_chats(command, tmp_path, content, words):
    path = tmp_path / "chat.json"
    path.write_text(content)
    refused(command("--chat", path), words)


def test_another_tokenizer(command, tmp_path):
    """Bytes instead of the model's own: they know no chats, and a larger vocabulary does not fit."""
    code, out, _ = command("--prompt", "aé", "--max-tokens", 3, "--tokenizer", "bytes")
    assert (code, out[:2]) == (0, "aé")
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES))
    refused(command("--chat", path, "--tokenizer", "bytes"), "'bytes' lacks <|open|>")
    refused(command("--prompt", "a", "--tokenizer", tmp_path / "no.json"), "no.json")


def test_missing_files(command, tmp_path):
    read = "name a file that can be read"
    refused(command("--chat", tmp_path / "none.json"), "none.json", "No such file", read)
    refused(
        command("--input", tmp_path / "none", "--output", tmp_path / "o"), "none", "No such file"
    )


# -- many requests


def test_files(command, trained, tmp_path):
    """Order, ids, text, tokens, reasons and log-probabilities; equal to each request alone."""
    output = tmp_path / "out.jsonl"
    asked = ["--input", jobs_file(tmp_path), "--output", output, "--logprobs", "--seed", 2]
    code, out, err = command(*asked, "--slots", 3)
    assert (code, out) == (0, "")
    assert "requests 6/6" in err
    found = records(output)
    assert [r["id"] for r in found] == IDS
    engine = engine_of(trained)
    jobs = read_jobs(str(jobs_file(tmp_path)))
    requests = generate_jobs.requests_of(jobs, engine.tokenizer, Request(prompt=(), seed=2))
    assert [r.seed for r in requests] == [2, 3, 9, 5, 6, 7]
    for record, request in zip(found, requests, strict=True):
        (want,) = engine.generate([request])
        assert (record["tokens"], record["text"]) == (want.tokens, want.text)
        assert record["finish_reason"] == want.finish_reason
        assert record["logprobs"] == pytest.approx(want.logprobs, abs=1e-5)
    modes = {3: "response", 4: "think"}
    for n, record in enumerate(found):
        assert ("message" in record) == (n in modes)
        if n in modes:
            assert record["message"] == parse(record["text"], modes[n]).to_dict()


def test_requests_that_begin_alike_read_it_once(command, tmp_path):
    """The same lines with snapshots and without; stderr tells what they spared."""
    start, lines = "the same words again " * 60, []
    path = jobs_file(
        tmp_path, [{"prompt": start + end, "max_tokens": 4} for end in ("a", "bc", "d")]
    )
    for n, flags in enumerate(([], ["--snapshots", 2])):
        output = tmp_path / f"{n}.jsonl"
        code, _, err = command("--input", path, "--output", output, "--slots", 1, *flags)
        assert code == 0
        assert ("1,024 tokens of prompts from snapshots" in err) == bool(flags), err
        lines.append(output.read_bytes())
    assert lines[0] == lines[1]
    refused(command("--prompt", "a", "--snapshots", -1), "snapshots is -1")


class Killed(BaseException):
    """Ends the process, as far as a test can tell."""


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("half", ["", '{"id": "f", "te'])
def test_a_stopped_process_loses_no_finished_request(trained, tmp_path, monkeypatch, after, half):
    """Stopped after some lines, and in the middle of one: the next start does the others only, and the file is the
    one of a run that was not stopped."""
    path = jobs_file(tmp_path)
    engine = engine_of(trained)

    def run(output):
        jobs = read_jobs(str(path))
        requests = generate_jobs.requests_of(jobs, engine.tokenizer, Request(prompt=()))
        out = Output(str(output), jobs)
        out.claim(jobs, requests, "model")
        generate_jobs.run_jobs(engine, jobs, requests, out, logprobs=False)

    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(whole)
    served = engine.stats.generated
    calls = []

    def fsync(_):
        calls.append(1)
        if len(calls) == after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(Killed):
            run(output)
    assert len(records(output)) == after
    done = sum(len(r["tokens"]) for r in records(output))
    with output.open("a") as file:
        file.write(half)
    before = engine.stats.generated
    run(output)
    assert output.read_bytes() == whole.read_bytes()
    assert engine.stats.generated - before == served - done
    run(output)  # nothing left
    assert output.read_bytes() == whole.read_bytes()
    assert engine.stats.generated - before == served - done


BAD = [
    ("{", ["line 2 is not JSON"]),
    ("[1]", ["line 2 holds a list"]),
    ({"id": "x"}, ["line 2", "either prompt or messages"]),
    ({"prompt": "a", "messages": MESSAGES}, ["line 2", "either prompt or messages"]),
    ({"prompt": 5}, ["line 2", "prompt=5"]),
    ({"prompt": "a", "colour": 1}, ["line 2", "'colour'", "known are"]),
    ({"prompt": "a", "id": None}, ["line 2", "id=None"]),
    ({"prompt": "a", "id": "a"}, ["line 2", "'a'", "line 1"]),
    ({"prompt": "a", "max_tokens": 1.5}, ["line 2", "max_tokens=1.5", "whole number"]),
    ({"prompt": "a", "max_tokens": True}, ["line 2", "max_tokens=True"]),
    ({"prompt": "a", "max_tokens": 0}, ["line 2", "max_tokens is 0"]),
    ({"prompt": "a", "max_tokens": 10**400}, ["line 2", "max_len is 64"]),
    ({"prompt": "a", "temperature": 10**400}, ["line 2", "temperature is 1000"]),
    ({"prompt": "a", "temperature": float("nan")}, ["line 2", "temperature=nan"]),
    ({"prompt": "a", "top_p": "x"}, ["line 2", "top_p='x'"]),
    ({"prompt": "a", "top_p": 3}, ["line 2", "top_p is 3"]),
    ({"prompt": "a", "temperature": float("inf")}, ["line 2", "temperature=inf"]),
    ({"prompt": "a", "seed": -1}, ["line 2", "seed is -1"]),
    ({"prompt": "a", "stop": [1]}, ["line 2", "stop=[1]"]),
    ({"prompt": "a", "stop": ""}, ["line 2", "at least one character"]),
    ({"prompt": "a", "effort": "max"}, ["line 2", "effort"]),
    ({"messages": [{"role": "user", "content": 3}]}, ["line 2", "message"]),
    ({"messages": MESSAGES, "effort": "medium"}, ["line 2", "medium"]),
    ({"messages": MESSAGES, "thinking": 1}, ["line 2", "thinking=1"]),
    ({"prompt": "abc", "max_tokens": 62}, ["line 2", "max_len is 64"]),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[str(line)[:40] for line, _ in BAD])
def test_a_bad_line_is_named(command, tmp_path, line, words):
    """One line of error, and no output file."""
    path, output = jobs_file(tmp_path, [LINES[0], line]), tmp_path / "out.jsonl"
    refused(command("--input", path, "--output", output, "--max-len", 64), str(path), *words)
    assert not output.exists()


def test_an_empty_file(command, tmp_path):
    refused(
        command("--input", jobs_file(tmp_path, ["", " "]), "--output", tmp_path / "o"), "no lines"
    )


def test_output_of_other_requests(tmp_path):
    jobs, output = read_jobs(str(jobs_file(tmp_path))), tmp_path / "out.jsonl"
    result = '"text": "", "tokens": [], "finish_reason": "stop", "request": "x"}\n'
    output.write_text(f'{{"id": "a", {result}{{"id": "other", {result}')
    with pytest.raises(UserError, match=r"out\.jsonl line 2 has the id 'other'"):
        Output(str(output), jobs)
    for id in ([], {}, None, True, 1.5):
        output.write_text(json.dumps({"id": id}) + "\n")
        with pytest.raises(UserError, match=r"out\.jsonl line 1 has the id "):
            Output(str(output), jobs)
    output.write_text('{"id": "a", "prompt": "x"}\n')
    with pytest.raises(UserError, match=r"out\.jsonl line 1 has no text, so it is no result"):
        Output(str(output), jobs)
    output.write_text("notes\n")
    with pytest.raises(UserError, match=r"out\.jsonl line 1 is not JSON"):
        Output(str(output), jobs)


def test_a_file_of_something_else_is_left_as_it_is(command, tmp_path):
    """What a kill left of a line is cut off, but nothing else."""
    path, notes = jobs_file(tmp_path), tmp_path / "notes.txt"
    for content in ("no line end", '{"id": "a"', "[1]", '{"prompt": "a"}'):
        notes.write_text(content)
        before = notes.read_bytes()
        code, out, err = command("--input", path, "--output", notes, "--max-tokens", 2)
        if content == '{"id": "a"':
            assert (code, [r["id"] for r in records(notes)]) == (0, IDS), err
            continue
        refused((code, out, err), str(notes), "choose another --output")
        assert notes.read_bytes() == before
    refused(command("--input", path, "--output", os.devnull), os.devnull, "is no file")
    before, link = path.read_bytes(), tmp_path / "link"
    link.symlink_to(path)
    for same in (path, link):
        refused(command("--input", path, "--output", same), "are the same file")
    assert path.read_bytes() == before


def test_results_of_changed_requests_are_not_taken(command, trained, tmp_path, monkeypatch):
    """Another prompt under the same id, other flags, another checkpoint: nothing is passed off as theirs."""
    output = tmp_path / "out.jsonl"
    lines = [{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2}]
    asked = ["--input", jobs_file(tmp_path, lines), "--output", output]
    assert command(*asked)[0] == 0
    before = output.read_bytes()
    assert command(*asked)[0] == 0
    words = ["out.jsonl", "in.jsonl line 1", "another prompt, setting or model"]
    for flag in (["--temperature", 0], ["--seed", 1], ["--stop", "x"], ["--logprobs"]):
        refused(command(*asked, *flag), *words)
    jobs_file(tmp_path, [{"prompt": "c", "max_tokens": 2}, lines[1]])
    refused(command(*asked), *words)
    jobs_file(tmp_path, lines)
    later = trained._replace(step=trained.step + 1)
    monkeypatch.setattr(run_dir, "load_trained", lambda path, step, mesh: later)
    refused(command(*asked), *words)
    assert output.read_bytes() == before


def test_two_processes_do_not_write_one_output(tmp_path):
    """The second is refused while the first writes, and if the first has written since it looked."""
    path, output = str(jobs_file(tmp_path, [{"prompt": "a"}])), tmp_path / "out.jsonl"
    jobs = read_jobs(path)
    first, second = Output(str(output), jobs), Output(str(output), jobs)
    first.claim(jobs, [Request(prompt=(1,))], "model")
    with first:
        code = (
            "import sys\nfrom k3jax.generate_jobs import Output, read_jobs\n"
            "with Output(sys.argv[2], read_jobs(sys.argv[1])):\n    pass\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, path, str(output)], capture_output=True, text=True
        )
        assert ran.returncode == 1
        assert "is being written by another process" in ran.stderr
        first.add(jobs[0], Result([5], [-1.0], "x", "length"), logprobs=False)
    before = output.read_bytes()
    with pytest.raises(UserError, match="has changed meanwhile"), second:
        pass
    assert output.read_bytes() == before


def test_output_that_cannot_be_written(command, tmp_path):
    output = tmp_path / "folder"
    output.mkdir()
    refused(command("--input", jobs_file(tmp_path), "--output", output), "folder")
