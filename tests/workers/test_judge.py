"""A judge behind a real HTTP server that is slow, broken, or talks nonsense."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from configs.errors import UserError
from configs.schema import RewardFunctionConfig
from workers.judge import JudgeError, filled, number_at
from workers.rewards import RewardFunctions, RewardSample, RewardScores

TOKEN = "token-that-nobody-may-see"


class Judge(BaseHTTPRequestHandler):
    """Does what the response under judgement says; keeps what it was sent."""

    bodies: ClassVar[list[Any]] = []
    seen: ClassVar[Counter[str]] = Counter()
    now = most = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            type(self).now += 1
            type(self).most = max(Judge.now, Judge.most)
            Judge.bodies.append((body, self.headers.get("Authorization")))
            text = body.get("response", "")
            Judge.seen[text] += 1
        try:
            self.say(text)
        finally:
            with self.lock:
                type(self).now -= 1

    def say(self, text: str) -> None:
        first = Judge.seen[text] == 1
        if text == "slow":
            time.sleep(1.5)
        if text == "a while":
            time.sleep(0.1)
        if text == "hang up":
            self.connection.close()
            return None
        if text == "echo":
            return self.answer(400, f"who is {self.headers.get('Authorization')}?")
        answers = {
            "broken": (500, "{}"),
            "broken once": (500 if first else 200, '{"score": 0.25}'),
            "busy once": (429 if first else 200, '{"score": 0.75}'),
            "garbage": (200, "<html>not JSON"),
            "no score": (200, '{"verdict": "good"}'),
            "nan": (200, '{"score": NaN}'),
            "word": (200, '{"score": "high"}'),
            "chat": (200, '{"choices": [{"message": {"content": "Out of 10: 3. No, Score: 8"}}]}'),
        }
        status, document = answers.get(text, (200, json.dumps({"score": len(text)})))
        return self.answer(status, document)

    def answer(self, status: int, document: str) -> None:
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0.1")
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Judge.bodies, Judge.seen, Judge.now, Judge.most = [], Counter(), 0, 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/judge"
        server.shutdown()
        thread.join()


def judged(url: str, *responses: str, settings: dict[str, Any] | None = None, **options: Any) -> RewardScores:
    options = {"url": url, "pause_s": 0.01, "retries": 1, **options}
    config = RewardFunctionConfig(path="http_judge", options=options, on_error="zero", **(settings or {}))
    with RewardFunctions([config], num_processes=2) as rewards:
        return rewards.score([RewardSample(prompt="p", response=text, answer='{"a": [1]}') for text in responses])


def test_scores_come_back_in_order_and_failures_cost_their_own_sample(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["four", "broken", "broken once", "busy once", "garbage", "no score", "nan", "word", "hang up", "x"]
    scores = judged(url, *texts)
    assert scores.parts["http_judge"].tolist() == [4, 0, 0.25, 0.75, 0, 0, 0, 0, 0, 1]
    failed = [text for text, is_failed in zip(texts, scores.failed["http_judge"], strict=True) if is_failed]
    assert failed == ["broken", "garbage", "no score", "nan", "word", "hang up"]
    assert Judge.seen["broken"] == 2 and Judge.seen["garbage"] == 1, "only what may mend is asked again"
    assert "the judge answered 500, 2 times" in caplog.text and "answered no JSON: '<html>not JSON'" in caplog.text


def test_a_slow_judge_meets_the_limits_of_the_request_and_of_the_sample(url: str) -> None:
    assert judged(url, "slow", "ok", timeout_s=0.2, retries=0).total.tolist() == [0, 2]
    assert judged(url, "slow", "ok", settings={"timeout_s": 0.3}).total.tolist() == [0, 2]


def test_requests_in_flight_are_bounded(url: str) -> None:
    assert judged(url, *["a while"] * 9, settings={"concurrency": 3}).total.tolist() == [7] * 9
    assert 2 <= Judge.most <= 3


def test_an_unreachable_judge_is_a_failure() -> None:
    assert judged("http://127.0.0.1:9", "x").errors == 1


def test_the_request_is_the_configured_one_and_the_score_is_found_in_a_chat(url: str) -> None:
    request = {
        "model": "m",
        "temperature": 0,
        "response": "{response}",
        "reference": "{answer}",
        "messages": [{"role": "user", "content": "Judge {response} to {prompt}, {answer}, in {JSON}"}],
    }
    options = {"request": request, "field": "choices.0.message.content", "pattern": r"Score: (\d+)", "scale": 0.1}
    assert judged(url, "chat", **options).total.tolist() == pytest.approx([0.8])
    body = Judge.bodies[0][0]
    assert body["messages"][0]["content"] == 'Judge chat to p, {"a": [1]}, in {JSON}'
    assert body["reference"] == {"a": [1]} and body["temperature"] == 0


def test_the_token_is_sent_and_never_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    assert judged(url, "ok", "echo", token_env="JUDGE_TOKEN").total.tolist() == [2, 0]
    assert {authorization for _, authorization in Judge.bodies} == {f"Bearer {TOKEN}"}
    printed = capfd.readouterr()
    assert "who is Bearer ***?" in caplog.text
    assert TOKEN not in caplog.text + printed.out + printed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "judge.local/score"}, "'judge.local/score' is no http:// or https:// address"),
        ({"url": "http://me:secret@host/"}, "url holds a password"),
        ({"url": "http://host/", "token_env": "NO_SUCH_VARIABLE"}, "variable NO_SUCH_VARIABLE is not set"),
        ({"url": "http://host/", "headers": {"authorization": "Bearer x"}}, "or set token_env"),
        ({"url": "http://host/", "pattern": "("}, "is no regular expression"),
        ({}, "missing a required keyword-only argument: 'url'|missing a required argument: 'url'"),
    ],
)
def test_options_that_cannot_work_are_one_line_at_the_start(options: dict[str, Any], message: str) -> None:
    config = RewardFunctionConfig(path="http_judge", options=options)
    with RewardFunctions([config]) as rewards, pytest.raises(UserError, match=message):
        rewards.check()


def test_templates_and_fields() -> None:
    assert filled(["{answer}", "{answer}!", 1, None], {"prompt": "", "response": "", "answer": None}) == [
        None,
        "null!",
        1,
        None,
    ]
    assert filled("{response}", {"prompt": "", "response": "{prompt}", "answer": ""}) == "{prompt}"
    assert number_at({"a": [{"b": True}]}, "a.0.b", None) == 1
    for field in ("a.1", "a.x", "b", "a"):
        with pytest.raises(JudgeError):
            number_at({"a": [{}]}, field, None)
