"""`pstar app`: the real planner answers when something is changed, and the question stands in the address and as a
command."""

from __future__ import annotations

import shlex
import socket
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.errors import PstarError
from pstar_sim.report import web
from pstar_sim.report.web.question import POLICIES, Question, fields
from pstar_sim.workload.axes import all_axes

pytestmark = pytest.mark.skipif(find_spec("streamlit") is None, reason="the extra `app` is not installed")
SCRIPT = Path(web.__file__).with_name("app.py")
SMALL = {"model": "gpt2", "batch": "1", "seq": "128"}


def opened(**address: str | list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Streamlit's own
        from streamlit.testing.v1 import AppTest

        app = AppTest.from_file(str(SCRIPT), default_timeout=300)
        for flag, text in address.items():
            app.query_params[flag.replace("_", "-")] = text
        return app.run()


@pytest.fixture(scope="module")
def app() -> Any:
    return opened(**SMALL)


def said(app: Any) -> str:
    return "\n".join(one.value for one in app.markdown)


def again(app: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        app.run()
    assert not app.exception


def test_the_app_says_what_the_planner_says(app: Any) -> None:
    assert not app.exception and not app.error
    machine = ps.machine("rtx4090-128gb")
    w = ps.preset("gpt2", batch=1, seq=128, dtype="bf16")
    row = ps.compare(w, machine, policies=["tide"], barrier_cost=False).rows[0]
    first = app.table[0].value
    assert list(first) == ["zero_offload", "tide"]
    rate = first["tide"]["tokens/s"].replace("\N{NO-BREAK SPACE}", " ")
    assert rate == f"{row.tokens_per_s:,.0f} ± {row.expected_error:.0%}".replace("%", " %")
    assert len(app.table) == 1, "other questions are answered where they are asked"


def test_a_field_asks_the_planner_again() -> None:
    app = opened(**SMALL, gpu_memory="4GB", host_memory="9GB")
    next(one for one in app.toggle if one.key == "largest").set_value(True)
    again(app)
    assert "B parameters with tide" in said(app) and "layers do not fit" in said(app)
    before = list(app.table[1].value["layers"])
    app.selectbox(key="host_memory").set_value("16GB")
    again(app)
    after = list(app.table[1].value["layers"])
    assert all(int(small) < int(large) for small, large in zip(before, after))
    assert "16GB" in app.query_params["host-memory"] and "--host-memory 16GB" in app.code[0].value


def test_the_app_opens_on_the_question_in_its_address() -> None:
    """That of the README, with adapters: the command below the answer is the same question."""
    app = opened(model="tiny-gpt2", batch="2", seq="64", lora="r=4", checkpointing="no", policy=["all_on_gpu"])
    assert not app.exception and not app.error
    assert app.selectbox(key="lora").value == "r=4" and list(app.table[0].value) == ["all_on_gpu"]
    words = shlex.split(app.code[0].value.replace("\\\n", ""))
    assert words[:2] == ["pstar", "compare"]
    assert {"--no-checkpointing", "--lora", "r=4", "tiny-gpt2", "all_on_gpu"} <= {*words}


def test_a_wrong_address_is_one_error_and_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pstar_sim.planner.compare.compare", lambda *_, **__: pytest.fail("planned"))
    for flag, text, says in (
        ("kernels", "mine", "kernels = 'mine': it must be one of eager, fused, compiled, megatron"),
        ("policy", "magic", "policy = 'magic': it must be one of all_on_gpu, zero_offload"),
    ):
        app = opened(**{flag: text})
        assert len(app.error) == 1 and says in app.error[0].value and not app.exception
        assert app.selectbox(key="model").value == "qwen3-4b", "the fields can still be used"
    for flag, text, says in (
        ("model", "nope", "nope"),
        ("batch", "many", "batch = 'many': it must be a whole number of at least 1"),
        ("gpu_memory", "big", "'big' is not a size"),
    ):
        app = opened(**{flag: text})
        assert len(app.error) == 1 and says in app.error[0].value and not app.exception


def test_every_axis_of_a_job_is_a_field_and_the_command_line_takes_its_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The texts are those of the flags: the command of a question with every kind of field is answered."""
    named = {field.name: field for field in fields()}
    assert {name for name, axis in all_axes().items() if axis.help} <= set(named)
    texts = {"lora": "r=8", "loss": "chunked", "kernels": "fused", "dtype": "bf16", "checkpointing": "yes",
             "micro_batches": "2", "gpu_memory": "8GB", "set": "link.bandwidth=x2"}  # fmt: skip
    question = Question.of({**SMALL, **texts}, ("tide",))
    assert question.job().seq == 128 and question.machine().gpu.memory_bytes == 8e9
    words = shlex.split(question.command().replace("\\\n", ""))
    assert main(words[1:]) == 0 and "tide" in capsys.readouterr().out
    address = question.address()
    assert (
        address["policy"] == ["tide"]
        and Question.of(
            {name: address[field.flag] for name, field in named.items() if field.flag in address}, ("tide",)
        )
        == question
    )
    assert Question.of({}).address() == {} and Question.of({}).policies == POLICIES
    with pytest.raises(PstarError, match="loss = 'half': it must be one of whole, chunked, fused"):
        Question.of({"loss": "half"})


def test_without_streamlit_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["app"]) == 2
    assert "pip install -e '.[app]' in the checkout" in capsys.readouterr().err


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
