"""Pages in a real browser without a network, and the app: nothing is logged, nothing is asked of another machine, what
can be pressed works."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser, chromium

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.core.plan import load_plan
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB

pytest.importorskip("plotly", reason="the extra `report` is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    tide = [100 * MIB, 300 * MIB, 300 * MIB, 100 * MIB, 50 * MIB]
    w = chain_workload(2, 64 * MIB, flops=2 * 64 * MIB * 4096, tide_bytes=tide)
    machine = ps.machine("rtx4090", gpu_memory="3GB")
    plans: list[str] = []
    for planned in ps.compare(w, machine, policies=["zero_offload", "tide"], barrier_cost=False).planned.values():
        plans.append(str(folder / f"{planned.policy}.json"))
        planned.save(plans[-1])
    assert main(["report", *plans, "-o", str(folder / "report.html"), "--quiet"]) == 0
    return folder / "report.html"


def test_the_report(browser: Browser, report: Path) -> None:
    page = browser.open(report.as_uri())
    charts = page.locator(".chart .main-svg").count()
    assert charts >= 6
    tide = page.locator("[data-figure='tide 0'] .xtitle")
    assert tide.text_content() == "time in the iteration [s]"
    page.get_by_role("button", name="by moment").click()
    assert tide.text_content() == "moment"
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("[data-theme-button]").click()
    assert page.evaluate(paper) != light
    theme, width = "document.documentElement.dataset.theme", "document.querySelector('.chart')._fullLayout.width"
    screen = page.evaluate(f"[{theme}, {width}]")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(theme) == "light" and page.evaluate(width) <= 680, "paper is white and narrow"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"state => JSON.stringify([{theme}, {width}]) == JSON.stringify(state)", arg=screen)
    unfolded = "document.querySelectorAll('details[open]').length"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(unfolded) == 4, "paper unfolds nothing"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(unfolded) == 0
    first = page.locator(".chart").first
    assert first.bounding_box()["y"] + 200 < 768, "the first screen of a notebook shows the tide"
    page.set_viewport_size({"width": 390, "height": 844})
    assert first.bounding_box()["y"] + 100 < 844, "so does that of a phone"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.log == [] and {*browser.asked} == {report.as_uri()}


@pytest.fixture(scope="module")
def whatif(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whatif")
    grid = {
        "machine": ["a100-80", "rtx4090-128gb"], "model": ["gpt2", "1B"], "batch": 1, "seq": 128,
        "policy": "zero_offload", "set": {"host.memory": ["x1", "16GB"], "link.bandwidth": ["x1", "+10%"]},
    }  # fmt: skip
    ps.sweep(grid, folder / "results.parquet", jobs=1)
    assert main(["page", str(folder / "results.parquet"), "-o", str(folder / "whatif.html")]) == 0
    return folder / "whatif.html"


def test_a_run_beside_its_prediction(browser: Browser, report: Path) -> None:
    """By moment the run lies over the prediction; by time each has a chart of its own."""
    plan = load_plan(report.with_name("tide.json"))
    slower = replace(play(plan, jitter=lambda step, k: 1.0 + 0.4 * (step % 3)), source="measured")
    slower.save(report.with_name("measured.json"))
    files = [str(report.with_name(name)) for name in ("tide.json", "measured.json")]
    out = report.with_name("run.html")
    assert main(["report", *files, "-o", str(out), "--quiet"]) == 0
    browser.log.clear()
    browser.asked.clear()
    page = browser.open(out.as_uri(), dark=True)
    measured = page.locator("[data-figure='tide 1']")
    assert not measured.is_visible() and page.get_by_text("(areas), measured (lines)").is_visible()
    page.get_by_role("button", name="by time").click()
    assert measured.is_visible() and measured.locator(".main-svg").count() > 0
    charts = [page.locator(f"[data-figure='tide {n}'] .main-svg").first for n in (0, 1)]
    fits = "svg => svg.getBoundingClientRect().width <= innerWidth / 2"
    page.wait_for_function(fits, arg=charts[0].element_handle())  # Plotly resizes a little later
    first, second = (chart.bounding_box() for chart in charts)
    assert first["width"] == second["width"] and first["height"] == second["height"] > 300, "side by side now"
    assert browser.log == [] and {*browser.asked} == {out.as_uri()}


def test_the_what_if_page_answers_in_three_clicks(browser: Browser, whatif: Path) -> None:
    """The largest model of a machine with less memory; the cheapest machine for a model; what a faster link brings."""
    browser.log.clear()
    browser.asked.clear()
    page = browser.open(whatif.as_uri(), width=390, dark=True)
    page.select_option("select#machine", label="rtx4090-128gb")
    page.select_option("select[id='set.host.memory']", label="16GB")
    small = page.locator("#largest").text_content()
    page.select_option("select[id='set.host.memory']", label="as it is")
    large = page.locator("#largest").text_content()
    assert small.startswith("gpt2 (0.124 B parameters)") and "does not fit" in small
    page.select_option("select[id='set.host.memory']", label="16GB")
    page.select_option("select#model", label="1B")
    assert re.search(r" does not fit: \w+ needs [\d.]+\sGB but has", page.locator("#job-reasons").text_content())
    page.select_option("select[id='set.host.memory']", label="as it is")
    assert not large.startswith("gpt2")
    page.locator("#days").fill("1000")
    page.select_option("select#model", label="1B")
    assert page.locator("#cheapest").text_content().startswith("1B: rtx4090-128gb with zero_offload, $")
    assert page.locator("#cheapest-table tbody tr").count() == 2
    page.locator("#days").fill("0.1")
    assert (
        page.locator("#cheapest").text_content().startswith("No machine of the sweep trains 1B in time; the fastest is")
    )
    more = page.locator("#more").text_content()
    assert "with link bandwidth +10%: -" in more and "±" in more
    bars = "[...document.querySelectorAll('.scroll')].filter(table => table.scrollWidth > table.clientWidth)"
    assert page.evaluate(f"{bars}.length") == 0, "no table is wider than the screen"
    change = page.locator("#more-table td[data-head=change]").last.text_content()
    assert re.fullmatch(r"-\d\.\d+ ± \d\.\d+ %", change), change
    assert page.locator("#pareto .main-svg").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.log == [] and {*browser.asked} == {whatif.as_uri()}


def test_the_what_if_page_tells_no_plan_from_too_little_memory(browser: Browser, tmp_path: Path) -> None:
    grid = {
        "machine": "v100-16", "model": "gpt2", "batch": 1, "seq": 128, "policy": ["zero_infinity:states=nvme", "tide"],
    }  # fmt: skip
    ps.sweep(grid, tmp_path / "results.parquet", jobs=1)
    assert main(["page", str(tmp_path / "results.parquet"), "-o", str(tmp_path / "page.html")]) == 0
    browser.log.clear()
    page = browser.open((tmp_path / "page.html").as_uri())
    assert page.locator("#job").text_content().startswith("gpt2 trains with tide: ")
    assert (
        "zero_infinity:states=nvme has no plan: machine 'v100-16' has no disks"
        in page.locator("#job-reasons").text_content()
    )
    assert not page.locator("#pareto").is_visible(), "no price, no picture of prices"
    page.select_option("select#policy", label="zero_infinity:states=nvme")
    assert page.locator("#job").text_content().startswith("gpt2 has no plan here: machine 'v100-16' has no disks")
    assert page.locator("#largest").text_content() == "No model of the sweep has a plan on this machine."
    page.locator("[data-theme-button]").click()
    assert browser.log == []


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server of `pstar app`, which ends with the test."""
    pytest.importorskip("streamlit", reason="the extra `app` is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "pstar_sim", "app", "--port", str(port), "--no-browser"]
    health = f"http://127.0.0.1:{port}/_stcore/health"
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(health).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)
    with pytest.raises(OSError, match="refused"):  # the command was the server
        urllib.request.urlopen(health)


@pytest.mark.whole
def test_the_app_asks_this_machine_alone(browser: Browser, address: str) -> None:
    """The one page with a network: what it asks for is asked of its own server."""
    browser.log.clear()
    browser.asked.clear()
    browser.context.set_offline(False)
    try:
        page = browser.open(address)
        page.get_by_text("What binds").wait_for()
        page.locator(".js-plotly-plot").first.wait_for()
        page.locator("[data-testid=stCode] .token").first.wait_for()
        inks = page.evaluate(
            "['stCaptionContainer', 'stCode'].map(name => document.querySelector(`[data-testid=${name}]`))"
            ".flatMap(one => [one, ...one.querySelectorAll('p, .token')]).map(one => getComputedStyle(one))"
            ".map(style => style.opacity + style.color)"
        )
        assert len(inks) > 3 and len({*inks}) == 1, "neither captions nor commands are paler than text"
    finally:
        browser.context.set_offline(True)
    assert {one.split("/")[2] for one in browser.asked if one.startswith("http")} == {address.split("/")[2]}
    assert not [line for line in browser.log if "rror" in line]
