"""`pstar app`: a question, answered anew at every change of a field.

Streamlit runs this file as a script each time; answers are kept. The page's address says the question, as does the
command below the answer.
"""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import streamlit as st
from pandas import DataFrame
from PIL import Image

from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override
from pstar_sim.catalog.prices import Price, load_prices
from pstar_sim.core.figures import BINDS_WORDS
from pstar_sim.core.plan_file import file_text
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import Comparison, Planned, Row, compare
from pstar_sim.planner.limits import Limit, max_model
from pstar_sim.planner.trust import untuned
from pstar_sim.policy.registry import built_in
from pstar_sim.report.palette import CATEGORIES
from pstar_sim.report.tables import format_change, format_percent, heading
from pstar_sim.report.web.charts import Chart, lanes_chart, themed, tide_chart
from pstar_sim.report.web.question import JOB, MACHINE, PARTS, POLICIES, TRAINING, Field, Question, fields
from pstar_sim.units import format_bytes, format_error, format_s

FASTER = 10  # per cent by which a part is made faster
CLEAR = "rgba(0,0,0,0)"
FIELDS = '[data-testid="stExpandSidebarButton"]'  # on a phone, what shows the fields
STYLE = f"""<style>
.block-container {{ padding-top: 3rem; }} h1 {{ padding-top: 0; }}
[data-testid="stCaptionContainer"] {{ opacity: 1; }} [data-testid="stCode"] span {{ color: inherit !important; }}
@media (max-width: 768px) {{
  {FIELDS} {{ width: auto; }} {FIELDS}::after {{ content: "change the question"; padding-left: 4px; }} }}
</style>"""


def main() -> None:
    st.set_page_config(page_title="pstar: what if?", page_icon=_icon(), layout="wide")
    st.html(STYLE)
    st.title("What if?")
    try:
        question = _question()
        if question is None:
            return
        if not question.policies:
            st.info("Choose at least one policy.")
            return
        comparison = _compared(question)
        _answer(comparison)
        _take_away(question, comparison)
        _pictures([comparison[row.policy] for row in comparison.rows if row.fits])
        _largest(question)
        _more(question, comparison)
    except PstarError as error:
        st.error(str(error))
    st.caption("Every figure is planned and simulated now. ± is one standard deviation that validation found for "
               "this class of machine; without runs of two sources the bar is at least "
               f"{format_error(untuned())}, that of all published runs together.")  # fmt: skip


def _icon() -> Any:
    """Icons by name come from elsewhere."""
    pixels = np.full((32, 32, 3), 255, np.uint8)
    pixels[:12], pixels[20:] = _rgb(CATEGORIES["non-model"]), _rgb(CATEGORIES["param"])
    return Image.fromarray(pixels)


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))


def _question() -> Question | None:
    """Fields begin with the address, and keep it up to date; its error is shown instead, with None."""
    asked = st.query_params
    wrong = False
    if "policy" not in st.session_state:
        texts = {field.name: asked[field.flag] for field in fields() if field.flag in asked}
        try:
            first = Question.of(texts, tuple(asked.get_all("policy")) or POLICIES)
        except PstarError as error:
            wrong, first = True, Question.of({})
            st.error(f"In the address, {error}. The fields have what the app opens with.")
        st.session_state["policy"] = list(first.policies)
        for field in fields():
            st.session_state.setdefault(field.name, dict(first.texts).get(field.name, ""))
    side = st.sidebar
    for group in (MACHINE, JOB):
        for field in fields():
            if field.group == group:
                _field(field, side)
    for group in (TRAINING, PARTS):
        mine = [field for field in fields() if field.group == group]
        with side.expander(group, expanded=any(st.session_state.get(field.name) for field in mine)):
            for field in mine:
                _field(field, st)
    known = list(dict.fromkeys([*built_in(), *st.session_state["policy"]]))
    policies = side.multiselect("policies", known, key="policy", help="optimal searches; it takes longer")
    texts = {field.name: st.session_state.get(field.name) or "" for field in fields()}
    if wrong:
        return None
    question = Question.of(texts, tuple(policies))
    asked.from_dict(question.address())
    return question


def _field(field: Field, place: Any) -> None:
    options = list(dict.fromkeys([*field.choices, st.session_state.get(field.name) or field.initial]))
    place.selectbox(
        field.flag.replace("-", " "),
        options,
        key=field.name,
        help=field.help,
        accept_new_options=field.open,
        format_func=lambda text: text or "as usual",
    )


@st.cache_resource(max_entries=64, show_spinner="planning", hash_funcs={Question: repr})
def _compared(question: Question, factor: float | None = None) -> Comparison:
    machine = question.machine()
    if factor is not None:
        machine = override(machine, {"link.bandwidth": f"x{factor:g}"})
    return compare(question.job().of(machine), machine, policies=list(question.policies), barrier_cost=False)


@st.cache_resource(max_entries=64, show_spinner="looking for the largest model", hash_funcs={Question: repr})
def _limits(question: Question) -> tuple[Limit, ...]:
    job = question.job()
    assert job.model is not None and job.batch is not None and job.seq is not None
    return max_model(
        question.machine(),
        batch=job.batch,
        seq=job.seq,
        like=job.model,
        micro_batches=job.micro_batches or 1,
        policies=list(question.policies),
        **job.given,
    ).rows


def _price(machine: Machine) -> Price | None:
    return load_prices().get(machine.name)


def _dollars(row: Row, price: Price | None, nodes: int) -> str:
    if price is None or not row.tokens_per_s:
        return "no price"
    usd = price.usd_per_hour * nodes / 3600 / row.tokens_per_s * 1e6
    return f"${f'{usd:#.3g}'.rstrip('.') if usd < 1000 else f'{usd:,.0f}'} {format_error(row.expected_error)}"


def _answer(found: Comparison) -> None:
    rows = [row for row in found.rows if row.fits]
    st.caption(heading(found).replace("\n", " "))
    if rows:
        best = min(rows, key=lambda row: row.iteration_s or 0.0)
        error = format_error(best.expected_error)
        binds = BINDS_WORDS.get(best.bound_by or "", best.bound_by)
        st.markdown(
            f"**{found.workload.model} trains with {best.policy}: {format_s(best.iteration_s or 0)} {error} per "
            f"iteration, {best.tokens_per_s:,.0f} tokens/s {error}. What binds: {binds}.**"
        )
    else:
        st.markdown(f"**{found.workload.model} does not fit here under any of these policies.**")
    for row in found.rows:
        if row.reason:
            st.markdown(row.reason.replace("$", "\\$"))
    price = _price(found.machine)
    # A column per policy, which a narrow screen has room for.
    st.table(_table(found))
    if price is not None:
        st.caption(
            f"Price: \\${price.usd_per_hour:.2f} per hour, {price.offer or price.source}, {price.as_of}. It is no "
            "prediction and has no bar; \\$ have the bar of the seconds."
        )


def _table(found: Comparison) -> DataFrame:
    price = _price(found.machine)
    return DataFrame({row.policy: _cells(row, price, found.machine.nodes) for row in found.rows})


def _cells(row: Row, price: Price | None, nodes: int) -> dict[str, str]:
    if not row.fits:
        names = ("seconds per iteration", "tokens/s", "$ per million tokens", "above the bound", "binds", "GPU", "host")
        return {**dict.fromkeys(names, ""), "seconds per iteration": "does not fit"}
    return {
        "seconds per iteration": _whole(f"{format_s(row.iteration_s or 0)} {format_error(row.expected_error)}"),
        "tokens/s": _whole(f"{row.tokens_per_s:,.0f} {format_error(row.expected_error)}"),
        "$ per million tokens": _whole(_dollars(row, price, nodes)),
        "above the bound": "" if row.gap is None else format_percent(row.gap),
        "binds": BINDS_WORDS.get(row.bound_by or "", row.bound_by or ""),
        "GPU": format_bytes(row.peak_gpu_bytes or 0),
        "host": format_bytes(row.peak_host_bytes or 0),
    }


def _take_away(question: Question, found: Comparison) -> None:
    st.code(question.command(), language="bash", wrap_lines=True)
    left, right = st.columns(2)
    left.download_button("the table (.csv)", _table(found).to_csv(), "comparison.csv", on_click="ignore")
    if any(row.fits for row in found.rows):
        best = found.best()
        name = f"{best.policy.replace(':', '-')}.json"
        text = file_text(best.with_predictions())
        right.download_button(f"the plan of {best.policy} (.json)", text, name, on_click="ignore")


def _largest(question: Question) -> None:
    like = question.job().model
    if not st.toggle(f"The largest model like {like} on this machine", key="largest"):
        return
    rows = _limits(question)
    best = max(rows, key=lambda row: row.params or 0)
    if best.params:
        st.markdown(
            f"**{best.params / 1e9:.2f} B parameters with {best.policy}: {best.value} layers like {like}; "
            f"{best.value + 1} layers do not fit.**"
        )
    else:
        st.markdown(f"**Not even one layer like {like} fits.**")
    st.table(
        [
            {
                "policy": row.policy,
                "parameters": f"{(row.params or 0) / 1e9:.2f} B",
                "layers": str(row.value),
                "of the catalog": row.catalog_model or "none",
                "then short of": row.short_of or "",
            }
            for row in rows
        ]
    )


def _more(question: Question, found: Comparison) -> None:
    if not st.toggle(f"What {FASTER} % more link brings", key="faster"):
        return
    then = {row.policy: row for row in _compared(question, 1 + FASTER / 100).rows}
    rows = []
    for row in found.rows:
        after = then[row.policy]
        if row.iteration_s and after.iteration_s:
            share = after.iteration_s / row.iteration_s - 1
            change = format_change(share, row.expected_error, after.expected_error)
            now, new = (
                f"{format_s(row.iteration_s)} {format_error(row.expected_error)}",
                f"{format_s(after.iteration_s)} {format_error(after.expected_error)}",
            )
            rows.append({"policy": row.policy, "now": _whole(now), "then": _whole(new), "change": _whole(change)})
    if rows:
        st.table(rows)
    else:
        st.markdown("**Nothing: no policy fits.**")


def _whole(text: str) -> str:
    """Units and signs stay with their figure."""
    for apart in (" %", " s", " ms", "± "):
        text = text.replace(apart, apart.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def _pictures(fitting: list[Planned]) -> None:
    import plotly.graph_objects as go

    kind = getattr(getattr(st.context, "theme", None), "type", None) or "light"
    if not fitting:
        return
    right_s = max(planned.timeline.iteration_s for planned in fitting)
    st.subheader("What fills the GPU, and what the queues do")
    for planned in fitting:
        t = planned.timeline
        st.markdown(
            f"**{planned.policy}: {format_s(t.iteration_s)} {format_error(planned.row.expected_error)} per iteration**"
        )
        top = t.budget_bytes.get("gpu") or t.peak_bytes["gpu"]
        for which, chart in (
            ("tide", tide_chart(t, x="time", right=right_s, top_bytes=top)),
            ("lanes", lanes_chart(t, right_s=right_s, plan=planned.plan)),
        ):
            figure: Any = go.Figure(themed(chart.figure, kind))
            figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR)  # the paper is Streamlit's
            st.plotly_chart(figure, key=f"{which} {planned.policy}", theme=None, config={"displayModeBar": False})
            st.html(_legend(chart, kind))
            for note in chart.notes:
                st.caption(note)


def _legend(chart: Chart, kind: str) -> str:
    swatches = {name: _swatch(themed(colour, kind), chart.lines.get(name)) for name, colour in chart.legend.items()}
    items = (f'<span style="white-space:nowrap">{item}&nbsp;{escape(name)}</span>' for name, item in swatches.items())
    return f"<small>{' &nbsp; '.join(items)}</small>"


def _swatch(colour: str, line: str | None) -> str:
    if line is None:
        return f'<span style="color:{colour}">&#9632;</span>'
    return f'<span style="display:inline-block;width:20px;vertical-align:3px;border-top:3px {line} {colour}"></span>'


if __name__ == "__main__":
    main()
