from __future__ import annotations

import html
import logging
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from flows.artifacts import artifact_key, fenced, iteration_markdown, publish_iteration, table
from flows.prefect_server import LocalPrefectServer, client_settings

NASTY = [
    "```\n# heading\n```",
    "`````` and ````text",
    "<script>alert(1)</script>\n<img src=x onerror=alert(1)>",
    "a | b\n--- | ---\n[link](javascript:alert(1)) ![x](y) $$x$$",
    "    indented\n\n\ttab\n> quote\n- list\n~~~\nx\n~~~",
    "bell \x07 escape \x1b[31m nul \x00 return \r surrogate \ud800 end",
    "",
]


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(markdown: str) -> Tags:
    return Tags(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))


@pytest.mark.parametrize("text", NASTY)
def test_a_sample_stays_text_whatever_the_model_wrote(text: str) -> None:
    page = rendered(fenced(text))
    assert page.tags == ["pre", "code"]
    plain = text.replace("\x07", "\\x07").replace("\x1b", "\\x1b").replace("\x00", "\\x00")
    assert page.text == plain.replace("\r", "\\r").replace("\ud800", "\\ud800") + "\n" + "\n"


@pytest.mark.parametrize("text", NASTY)
def test_a_table_cell_stays_one_cell_of_text(text: str) -> None:
    page = rendered(table(("metric", "value"), [(text, "1")]))
    assert page.tags == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    assert html.unescape(page.text).split() == ["metric", "value", *rendered(fenced(text)).text.split(), "1"]


def test_a_long_sample_is_cut_and_says_so() -> None:
    assert "… (500 more characters)" in fenced("x" * 2500)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ppo-20260101", "ppo-20260101-iterations"),
        ("My Run_1.0", "my-run-1-0-iterations"),
        ("лёгкий", "run-iterations"),
    ],
)
def test_keys_are_what_prefect_accepts(name: str, key: str) -> None:
    assert artifact_key(name, "iterations") == key


def test_a_page_without_samples_has_no_sample_headings() -> None:
    page = iteration_markdown("run", 0, {"loss": 0.123456, "n": 3}, {"a": 1.0, "b": 3.0}, "", "")
    assert "sample" not in page
    assert "| loss | 0.12346 |" in page and "| b | 3.000 | 75% |" in page


def test_warnings_come_before_the_metrics() -> None:
    page = iteration_markdown("run", 0, {"loss": 1.0}, {}, "", "", warnings=["a gap of 0.5"])
    assert page.index("**Warning:** a gap of 0.5") < page.index("| loss |")


async def test_each_iteration_is_a_version_of_one_artifact(prefect_server: LocalPrefectServer) -> None:
    from prefect import flow, get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    @flow
    async def run() -> float:
        await publish_iteration("Run 7", "Run 7-2026", 0, {"reward_mean": 0.1}, {"x": 1.0}, NASTY[5], NASTY[2])
        started = time.perf_counter()
        for iteration in range(1, 6):
            metrics = {f"metric_{i}": float(i) for i in range(40)}
            await publish_iteration("Run 7", "Run 7-2026", iteration, metrics, {"x": 1.0}, "best", "worst")
        return (time.perf_counter() - started) / 5

    seconds = await run()
    async with get_client() as client:
        key = ArtifactFilter(key=ArtifactFilterKey(any_=["run-7-iterations"]))
        artifacts = await client.read_artifacts(artifact_filter=key)
    assert len(artifacts) == 6
    assert all(artifact.type == "markdown" and artifact.flow_run_id for artifact in artifacts)
    assert seconds < 1.0, "an artifact is to be cheap"


@pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning")
async def test_a_lost_server_is_one_warning_with_its_cause(
    prefect_server: LocalPrefectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        client_settings("http://127.0.0.1:9/api", tmp_path),
        caplog.at_level(logging.WARNING, logger="flows.artifacts"),
    ):
        for iteration in range(2):
            await publish_iteration("lost", "lost", iteration, {}, {}, "", "")
    lines = [record.getMessage() for record in caplog.records if record.name == "flows.artifacts"]
    assert len(lines) == 1
    assert "iteration 0 of lost" in lines[0] and "ConnectError" in lines[0]
