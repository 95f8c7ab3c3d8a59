"""`pstar app`: the real planner answers when something is moved."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.report import web

pytest.importorskip("streamlit", reason="the extra `app` is not installed")
SCRIPT = Path(web.__file__).with_name("app.py")


@pytest.fixture(scope="module")
def app() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Streamlit's own
        from streamlit.testing.v1 import AppTest

        started = AppTest.from_file(str(SCRIPT), default_timeout=300)
        started.session_state["model"] = "gpt2"
        started.session_state["batch"] = 1
        started.session_state["sequence"] = 128
        return started.run()


def said(app: Any) -> str:
    return "\n".join(one.value for one in app.markdown)


def test_the_app_says_what_the_planner_says(app: Any) -> None:
    assert not app.exception and not app.error
    machine = ps.machine("rtx4090-128gb")
    w = ps.preset("gpt2", batch=1, seq=128, dtype="bf16")
    row = ps.compare(w, machine, policies=["tide"], barrier_cost=False).rows[0]
    first = app.table[0].value
    assert list(first) == ["zero_offload", "tide"]
    assert first["tide"]["tokens/s"] == f"{row.tokens_per_s:,.0f} ± {row.expected_error:.0%}".replace("%", " %")
    assert "B parameters with tide" in said(app) and "layers do not fit" in said(app)


def test_a_slider_asks_the_planner_again(app: Any) -> None:
    before = list(app.table[1].value["layers"])
    slider = next(one for one in app.slider if one.label.startswith("host memory"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slider.set_value(32.0)
        app.run()
    assert not app.exception
    after = list(app.table[1].value["layers"])
    assert all(int(small) < int(large) for small, large in zip(after, before))


def test_without_streamlit_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["app"]) == 2
    assert "pip install 'pstar-sim[app]'" in capsys.readouterr().err


def test_a_port_that_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for port, says in (("65536", "must be a port from 1 to 65535, not 65536"), ("0", "must be a port from 1 to 65535")):
        assert main(["app", "--port", port]) == 2
        assert f"argument --port: {says}" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["app", "--port", port, "--no-browser"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"argument --port: {port} cannot be used" in err and "give another port" in err
