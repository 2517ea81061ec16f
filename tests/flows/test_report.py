"""The report: bounded, self-contained, and text stays text, in a real browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flows.cli import main
from pipeline.rollouts import Rollouts, offsets_of
from storage.metrics import MetricsLog
from storage.report import collect, pick, spread
from storage.report_page import render
from storage.rollout_store import RolloutStore
from storage.run_directory import RunDirectory
from storage.token_text import TokenTexts
from tests.browser import browser_path, open_browser
from tests.flows.stored_run import stored_run
from tests.flows.test_cli import ROOT, Capture, document_of

EVIL = (
    "</script><script>document.title='owned'</script><!--<script>"
    "<img src=x onerror=\"document.title='owned'\"> \u2028 ]]>"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Three iterations whose model writes markup, with metrics."""
    run = stored_run(tmp_path_factory.mktemp("report"), iterations=2)
    store = RolloutStore(run.rollouts)
    texts = np.array([EVIL, "needle in a haystack", "plain", "\ud7ff\x00 ☃"], dtype=object)
    batch = Rollouts(
        offsets=offsets_of([3, 4, 1, 2]),
        token_columns={
            "token_ids": np.arange(10, dtype=np.int32),
            "advantages": np.linspace(-1, 1, 10).astype(np.float32),
            "log_probs": np.full(10, -1, np.float32),
            "rollout_log_probs": np.linspace(-1, -2, 10).astype(np.float32),
        },
        sample_columns={
            "prompt_length": np.ones(4, np.int32),
            "prompt_text": texts[::-1].copy(),
            "text": texts,
            "reward": np.array([0.5, 1, -1, np.nan], np.float32),
        },
    )
    manifest = store.write(2, "actor.generate_sequences", batch, new_rows=True, attempt="a")
    store.commit(2, manifest, metrics={})
    log = MetricsLog(run.metrics)
    for iteration in range(3):
        metrics = {"reward_mean": iteration / 2, "kl": 0.1, "response_length_mean": float("nan"), EVIL: 1.0}
        judged = {"eval/mean@2": 0.25, "eval/mean@2_low": 0.125, "eval/mean@2_high": 0.5, "eval/prompts": 9.0}
        log.append(iteration, {**metrics, **(judged if iteration == 2 else {}), "time/iteration": 2.0})
    return run


# CI has a browser (.ci/run installs it); elsewhere the page's text is looked at by the tests below.
@pytest.mark.skipif(browser_path() is None and not os.environ.get("CI"), reason="no Chromium here; CHROMIUM=PATH")
def test_the_page_in_a_browser(run: RunDirectory, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    document = document_of(capsys, "report", str(run.path), "--output", str(page))
    assert (document["iterations"], document["samples"]) == (3, 12)
    (tmp_path / "profile").mkdir()
    with open_browser(tmp_path / "profile") as browser:
        seconds = browser.open(page)
        assert browser.evaluate("document.title") == run.path.name
        assert browser.evaluate("[...evaluations.rows].map(r => r.innerText.split('\\t').join(' '))") == [
            "3 validation mean@2 0.25 0.125 to 0.5"
        ]
        assert browser.evaluate("config.textContent") == run.config_yaml.read_text()
        heads = browser.evaluate("[...document.querySelectorAll('article strong')].map(e => e.textContent)")
        assert len(heads) == 4 and {head.split(",")[0] for head in heads} == {"iteration 2"}, "it opens with the last"
        browser.evaluate("(iteration.value = '', iteration.dispatchEvent(new Event('input')))")
        assert browser.evaluate("document.querySelectorAll('article').length") == 12
        assert browser.evaluate("document.querySelectorAll('script').length") == 2
        assert browser.evaluate("document.querySelectorAll('article img, article script').length") == 0
        assert browser.evaluate("document.querySelectorAll('#charts figure').length") == 3
        browser.evaluate("(search.value = 'NEEDLE', search.dispatchEvent(new Event('input')))")
        found = browser.evaluate("[...document.querySelectorAll('article')].map(a => a.textContent)")
        assert len(found) == 2 and all("needle in a haystack" in text for text in found)
        browser.evaluate("(search.value = 'onerror=', search.dispatchEvent(new Event('input')))")
        assert EVIL in browser.evaluate("document.querySelector('article').textContent")
        browser.evaluate("(search.value = '', column.value = 'advantages', column.dispatchEvent(new Event('input')))")
        colours = browser.evaluate("[...document.querySelectorAll('.tokens span')].map(s => s.style.backgroundColor)")
        assert len({colour for colour in colours if colour}) > 5
        assert browser.evaluate("document.title") == run.path.name
        assert browser.problems == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert seconds < 20


def test_no_text_of_a_model_is_markup(run: RunDirectory) -> None:
    page = render(collect(run, TokenTexts([])))
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and "<!--" not in page and "\u2028" not in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    samples = json.loads(data[1])["samples"]
    assert EVIL in [sample["text"] for sample in samples] and EVIL in [sample["prompt"] for sample in samples]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_samples_are_the_best_the_worst_and_others(run: RunDirectory) -> None:
    data = collect(run, TokenTexts([]), per_iteration=3)
    last = [sample for sample in data["samples"] if sample["iteration"] == 2]
    assert [(sample["why"], sample["row"]) for sample in last[:2]] == [("best", 1), ("worst", 2)]
    assert last[0]["tokens"] == ["⟨4⟩", "⟨5⟩", "⟨6⟩"]
    np.testing.assert_allclose(last[0]["columns"]["advantages"], np.linspace(-1, 1, 10)[4:7], rtol=1e-3)
    np.testing.assert_allclose(last[0]["columns"]["log_prob_gap"], np.linspace(0, 1, 10)[4:7], rtol=1e-3)
    assert pick(None, 5, 3, seed=0).keys() <= set(range(5))
    unscored = pick(np.array([np.nan] * 4), 4, 9, seed=0)
    assert sorted(unscored) == [0, 1, 2, 3] and set(unscored.values()) == {"any"}


def test_a_long_run_is_spread_over(run: RunDirectory) -> None:
    stored = list(range(1000))
    chosen = spread(stored, {417: 9.0, 3: -9.0, 5000: 99.0}, 24)
    assert len(chosen) == 24 and chosen == sorted(chosen) and {0, 3, 417, 999} <= set(chosen)
    assert spread([1, 2], {}, 24) == [1, 2] and spread(stored, {}, 1) == [0]
    data = collect(run, TokenTexts([]), max_iterations=2, per_iteration=2)
    assert {sample["iteration"] for sample in data["samples"]} == {0, 2} and len(data["samples"]) == 4


def test_nothing_to_report_and_a_folder_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    empty = stored_run(tmp_path, iterations=0)
    assert main(["report", str(empty.path)]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert main(["report", str(empty.path), "--output", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("inside", ["config.json", "rollouts/c.html", "exports/../status.json", "no.txt"])
def test_a_report_never_lands_on_what_a_run_is_made_of(run: RunDirectory, capsys: Capture, inside: str) -> None:
    before = (run.path / "config.json").read_bytes()
    assert main(["report", str(run.path), "--output", f"{run.path}/{inside}"]) == 2
    assert "lies in the run directory" in capsys.readouterr().err
    assert (run.path / "config.json").read_bytes() == before and not (run.path / "rollouts" / "c.html").exists()


def test_reading_unpickles_nothing_and_loads_no_torch(run: RunDirectory, tmp_path: Path) -> None:
    program = (
        "import pickle, sys\n"
        "def refuse(*args, **kwargs): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "from flows.cli import main\n"
        "for command in (['report'], ['rollouts', 'ls'], ['rollouts', 'stats'], ['status']):\n"
        "    assert main([*command, sys.argv[1]]) == 0\n"
        "print({'torch', 'prefect', 'distributed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
