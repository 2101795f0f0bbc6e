"""The program: its options, the address, the first line, and its end by signals."""

from __future__ import annotations

import io
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import openai
import pytest

from dspark_jax.config import log_to_stderr
from dspark_jax.serving.http.server import Server, bind, make_service, model_name
from dspark_jax.serving.http.service import Serving
from dspark_jax.serving.http.settings import HttpSettings, parse_address
from dspark_jax.serving.main import main
from dspark_jax.serving.offline import make_serving_generator, slot_sizes
from dspark_jax.serving.settings import parse_settings
from tests.conftest import ROOT

HTTP = ["--http", "127.0.0.1:0"]
REFUSED = [
    (["--http", "nowhere"], "http 'nowhere': must be HOST:PORT"),
    (["--http", "127.0.0.1:99999"], "must be HOST:PORT"),
    (["--http", "::1:8000"], "must be HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000"),
    ([*HTTP, "--prompt", "a"], "exactly one of --prompt"),
    ([*HTTP, "--output", "x"], "--output: only goes with --prompts"),
    ([*HTTP, "--temperature", "1"], "--temperature: does not go with --http"),
    ([*HTTP, "--max-tokens", "5"], "--max-tokens: does not go with --http"),
    ([*HTTP, "--batch-size", "0"], "batch_size 0: must be at least 1"),
    ([*HTTP, "--batch-size", "3", "--data", "2"], "batch_size 3: must be a multiple of data 2"),
    ([*HTTP, "--max-context", "1"], "max_context 1: must be at least 2 tokens"),
    ([*HTTP, "--max-logprobs", "21"], "max_logprobs 21: must lie in 0..20"),
    ([*HTTP, "--max-waiting", "-1"], "max_waiting -1: must be at least 0"),
    ([*HTTP, "--max-body", "0"], "max_body 0: must be at least 1 byte"),
    ([*HTTP, "--rounds", "0"], "rounds 0: must be at least 1 round"),
    ([*HTTP, "--drain-seconds", "-1"], "drain_seconds -1.0: must be at least 0"),
    ([*HTTP, "--model-name", " "], "model_name ' ': must not be empty"),
    ([*HTTP, "--api-key", "a b"], "api_key: must be printable ASCII without blanks"),
    (["--prompt", "a", "--api-key", "k"], "--api-key: only goes with --http"),
    (["--prompt", "a", "--no-warm-up"], "--warm-up: only goes with --http"),
    ([*HTTP, "--warm-up-tokens", "-1"], "warm_up_tokens -1: must be at least 0 tokens"),
    (["--prompt", "a", "--max-context", "64"], "--max-context: only goes with --http"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_options_are_one_line_on_stderr_and_code_2(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err


def test_options_become_settings(monkeypatch):
    words = [*HTTP, "--api-key", "a", "--api-key", "b", "--model-name", "m", "--no-warm-up", "--seed", "3"]
    settings = parse_settings(words)
    assert settings.server == HttpSettings("127.0.0.1:0", "m", ("a", "b"), warm_up=False)
    assert settings.slots == 8 and parse_settings([*HTTP, "--batch-size", "2"]).slots == 2
    assert parse_settings(["--prompt", "a"]).slots == 1
    monkeypatch.setenv("DSPARK_API_KEY", "c, d")
    assert settings.server.keys({"DSPARK_API_KEY": "c, d"}) == ("a", "b", "c", "d")
    assert settings.server.keys({}) == ("a", "b")


def test_keys_stay_out_of_reports_and_messages():
    settings = parse_settings([*HTTP, "--api-key", "hush"])
    assert "hush" not in json.dumps(settings.as_json()) and "hush" not in repr(settings)
    assert settings.as_json()["http"] == "127.0.0.1:0" and settings.as_json()["batch_size"] == 8


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:8000", ("::1", 8000)), ("name.example:0", ("name.example", 0))],
)
def test_addresses(text, address):
    assert parse_address(text) == address


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(capsys):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--http", f"127.0.0.1:{port}", "--target", "/nowhere"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"http 127.0.0.1:{port}: the address cannot be had" in err


def test_names_of_models(tmp_path):
    file = tmp_path / "some-model.Q8_0.gguf"
    file.touch()
    name = lambda *words: model_name(parse_settings([*HTTP, *words]))  # noqa: E731
    assert name("--target", str(file)) == "some-model.Q8_0"
    assert name("--target", str(tmp_path)) == tmp_path.name
    assert name("--target", "org/model") == "org/model"
    assert name() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name("--model-name", "mine") == "mine"


def test_slot_sizes():
    assert [slot_sizes(most) for most in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]
    assert slot_sizes(8, 2) == (2, 4, 8) and slot_sizes(2, 2) == (2,)


def test_settings_reach_the_engine(models):
    words = "--batch-size 4 --max-context 100 --max-logprobs 2 --rounds 3 --schedule threshold --threshold 0.25 "
    words += "--seed 5"
    generator = make_serving_generator(models, parse_settings([*HTTP, *words.split()]))
    assert (generator.slot_sizes, generator.context, generator.top_logprobs) == ((1, 2, 4), 100, 2)
    assert (generator.schedule, generator.threshold, generator.trace_rounds) == ("threshold", 0.25, 3)
    assert generator.switchable and generator.seed == 5 and generator.drafter is models.drafter


def test_settings_reach_the_service(models, monkeypatch):
    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    words = "--batch-size 1 --max-context 64 --no-warm-up --model-name m --api-key k --max-logprobs 2 "
    words += "--max-waiting 3 --max-body 500 --rounds 3"
    settings = parse_settings([*HTTP, *words.split()])
    service = make_service(settings, models, make_serving_generator(models, settings))
    try:
        drafter = models.drafter.path.name
        assert service.serving == Serving("m", drafter, ("k",), max_logprobs=2, max_waiting=3, max_body=500)
        assert service.engine.rounds == 3
    finally:
        service.close()
        service.engine.close(drain=False, timeout=60)


def test_a_signal_that_comes_amid_a_line_of_the_log_is_heard(service, monkeypatch):
    """Writing another line then raises (`reentrant call`), so the handler must not."""
    server, asked = Server(service, 1.0), []
    server._loop = SimpleNamespace(call_soon_threadsafe=lambda *call: asked.append(call))

    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            server.handle_exit(signal.SIGTERM, None)  # as the interpreter does between two writes
            return len(data)

    stream = io.TextIOWrapper(io.BufferedWriter(Terminal()), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with log_to_stderr():
        logging.getLogger("dspark_jax").info("a line")
    assert asked


# --- the program ---


@contextmanager
def program(models_flags, *words):
    """`serve.py --http`, ready; its process, its URL and all lines of its log so far."""
    own = ["--max-context", "64", "--batch-size", "1"]
    command = [sys.executable, "serve.py", *HTTP, *models_flags, *own, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(process.stderr))
        reader.start()
        try:
            line = process.stdout.readline()
            assert line.startswith("ready: http://127.0.0.1:"), (line, log)
            yield process, line.split()[1], log
        finally:
            process.kill()
            reader.join(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(models_flags, number, tmp_path):
    """The request is under way when the signal comes: its stream ends whole, the log says so, and the code is 0."""
    report = tmp_path / "r.json"
    with program(models_flags, "--model-name", "m", "--no-warm-up", "--json", str(report)) as (process, url, log):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model="m", prompt="a", max_tokens=50, temperature=0, stream=True)
            chunks = [next(stream)]
            process.send_signal(number)
            chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert process.wait(60) == 0
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=1)
    text = "".join(log)
    assert f"{number.name}: running requests have 30 s to end" in text and "POST /v1/completions 200" in text
    assert "Traceback" not in text and "compiling for" not in text
    written = json.loads(report.read_text())
    assert written["statistics"]["completed"] == 1 and written["settings"]["model_name"] == "m"


def test_the_program_warms_up_and_ends_at_once_when_idle(models_flags):
    words = ("--warm-up-tokens", "20", "--drain-seconds", "7")
    with program(models_flags, *words) as (process, url, log):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            model = client.models.list().data[0].id
            assert client.completions.create(model=model, prompt="a", max_tokens=3).usage.completion_tokens <= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    text = "".join(log)
    assert "compiling for texts of up to 20 tokens" in text and "running requests have 7 s to end" in text
