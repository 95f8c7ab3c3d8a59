"""The app behind `pstar app`: the questions of the what-if page, which the planner answers while the user moves
sliders.

Streamlit runs this file as a script, again at every change of an input. Answers are kept in memory, so that an earlier
choice is shown at once.
"""

from __future__ import annotations

from html import escape
from typing import Any

import streamlit as st
from pandas import DataFrame

from pstar_sim.catalog.listing_rows import list_machines
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_names
from pstar_sim.catalog.prices import Price, load_prices
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import Comparison, Planned, Row, compare
from pstar_sim.planner.limits import Limit, max_model
from pstar_sim.planner.trust import untuned
from pstar_sim.policy.registry import built_in
from pstar_sim.report.tables import BINDS_WORDS, format_change, format_percent
from pstar_sim.report.web.charts import Chart, lanes_chart, themed, tide_chart
from pstar_sim.units import GB, format_bytes, format_error, format_s
from pstar_sim.workload.presets import default_dtype, preset

__all__ = ["main"]

MACHINE, MODEL, BATCH, SEQUENCE = "rtx4090-128gb", "4B", 8, 1024
POLICIES = ("zero_offload", "tide")
FASTER = 10  # per cent by which a part is made faster
CLEAR = "rgba(0,0,0,0)"

Changes = tuple[tuple[str, str], ...]


def main() -> None:
    st.set_page_config(page_title="What if?", layout="wide")
    st.title("What if?")
    st.caption("Every figure is planned and simulated now. ± is one standard deviation that validation found for "
               "this class of machine; without runs of two sources the bar is at least "
               f"{format_error(untuned())}, that of all published runs together.")  # fmt: skip
    name, changes = _machine()
    model, batch, sequence, policies = _job()
    if not policies:
        st.info("Choose at least one policy.")
        return
    try:
        found = _compared(name, changes, model, batch, sequence, policies)
        _answer(found)
        _largest(name, changes, batch, sequence, policies)
        _more(name, changes, model, batch, sequence, policies, found)
    except PstarError as error:
        st.error(str(error))
        return
    fitting = [found[row.policy] for row in found.rows if row.fits]
    if fitting:
        _pictures(fitting)


def _machine() -> tuple[str, Changes]:
    names = [str(row["machine"]) for row in list_machines()]
    side = st.sidebar
    name = side.selectbox("machine", names, index=names.index(MACHINE), key="machine")
    m = load_machine(name)
    gpu, host = m.gpu.memory_bytes / GB, m.host.memory_bytes / GB
    wanted_gpu = side.slider("GPU memory [GB]", 4.0, max(192.0, gpu), gpu, 1.0, key=f"gpu {name}")
    wanted_host = side.slider("host memory [GB]", 16.0, max(2048.0, host), host, 16.0, key=f"host {name}")
    link = side.slider("link, times as fast", 0.25, 4.0, 1.0, 0.05, key=f"link {name}")
    changes: list[tuple[str, str]] = []
    if wanted_gpu != gpu:
        changes.append(("gpu.memory", f"{wanted_gpu:g}GB"))
    if wanted_host != host:
        changes.append(("host.memory", f"{wanted_host:g}GB"))
    if link != 1.0:
        changes.append(("link.bandwidth", f"x{link:g}"))
    return name, tuple(changes)


def _job() -> tuple[str, int, int, tuple[str, ...]]:
    side = st.sidebar
    names = list(model_names())
    model = side.selectbox("model", names, index=names.index(MODEL), key="model")
    batch = side.slider("batch", 1, 64, BATCH, key="batch")
    sequence = side.select_slider("tokens per sequence", (128, 256, 512, 1024, 2048, 4096), SEQUENCE, key="sequence")
    policies = side.multiselect("policies", list(built_in()), list(POLICIES), key="policies")
    return model, batch, sequence, tuple(policies)


def _made(name: str, changes: Changes) -> Machine:
    return load_machine(name, overrides=dict(changes))


@st.cache_resource(max_entries=64, show_spinner="planning")
def _compared(
    name: str, changes: Changes, model: str, batch: int, sequence: int, policies: tuple[str, ...]
) -> Comparison:
    machine = _made(name, changes)
    w = preset(model, batch=batch, seq=sequence, dtype=default_dtype(machine))
    return compare(w, machine, policies=list(policies), barrier_cost=False, near=False)


@st.cache_resource(max_entries=64, show_spinner="looking for the largest model")
def _limits(name: str, changes: Changes, batch: int, sequence: int, policies: tuple[str, ...]) -> tuple[Limit, ...]:
    machine = _made(name, changes)
    return max_model(machine, batch=batch, seq=sequence, like=MODEL, policies=list(policies)).rows


def _price(machine: Machine) -> Price | None:
    return load_prices().get(machine.name)


def _dollars(row: Row, price: Price | None, nodes: int) -> str:
    if price is None or not row.tokens_per_s:
        return "no price"
    return f"${price.usd_per_hour * nodes / 3600 / row.tokens_per_s * 1e6:.3g} {format_error(row.expected_error)}"


def _answer(found: Comparison) -> None:
    """Whether the job fits, how fast it runs, its price and its bottleneck."""
    rows = [row for row in found.rows if row.fits]
    st.subheader("This job")
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
    price = _price(found.machine)
    # A column per policy, which a narrow screen has room for.
    st.table(DataFrame({row.policy: _cells(row, price, found.machine.nodes) for row in found.rows}))
    if price is not None:
        st.caption(
            f"Price: ${price.usd_per_hour:.2f} per hour, {price.offer or price.source}, {price.as_of}. It is no "
            "prediction and has no bar; $ have the bar of the seconds."
        )
    for row in found.rows:
        if row.reason:
            st.caption(row.reason)


def _cells(row: Row, price: Price | None, nodes: int) -> dict[str, str]:
    if not row.fits:
        names = ("seconds per iteration", "tokens/s", "$ per million tokens", "above the bound", "binds", "GPU", "host")
        return {**dict.fromkeys(names, ""), "seconds per iteration": "does not fit"}
    return {
        "seconds per iteration": f"{format_s(row.iteration_s or 0)} {format_error(row.expected_error)}",
        "tokens/s": f"{row.tokens_per_s:,.0f} {format_error(row.expected_error)}",
        "$ per million tokens": _dollars(row, price, nodes),
        "above the bound": "" if row.gap is None else format_percent(row.gap),
        "binds": BINDS_WORDS.get(row.bound_by or "", row.bound_by or ""),
        "GPU": format_bytes(row.peak_gpu_bytes or 0),
        "host": format_bytes(row.peak_host_bytes or 0),
    }


def _largest(name: str, changes: Changes, batch: int, sequence: int, policies: tuple[str, ...]) -> None:
    st.subheader("The largest model on this machine")
    rows = _limits(name, changes, batch, sequence, policies)
    best = max(rows, key=lambda row: row.params or 0)
    if best.params:
        st.markdown(
            f"**{best.params / 1e9:.2f} B parameters with {best.policy}: {best.value} layers like {MODEL}; "
            f"{best.value + 1} layers do not fit.**"
        )
    else:
        st.markdown(f"**Not even one layer like {MODEL} fits.**")
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


def _more(
    name: str,
    changes: Changes,
    model: str,
    batch: int,
    sequence: int,
    policies: tuple[str, ...],
    found: Comparison,
) -> None:
    """The gain of a link that is FASTER per cent faster."""
    st.subheader(f"What {FASTER} % more link brings")
    factor = float(dict(changes).get("link.bandwidth", "x1")[1:]) * (1 + FASTER / 100)
    faster = (*(c for c in changes if c[0] != "link.bandwidth"), ("link.bandwidth", f"x{factor:.6g}"))
    then = {row.policy: row for row in _compared(name, faster, model, batch, sequence, policies).rows}
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
    """Units, and signs of an error, stay on the line of their figure."""
    for apart in (" %", " s", "± "):
        text = text.replace(apart, apart.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def _pictures(fitting: list[Planned]) -> None:
    """The tide and the queues of each policy, on shared axes."""
    import plotly.graph_objects as go

    kind = getattr(getattr(st.context, "theme", None), "type", None) or "light"
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
    """HTML: names beside their colours."""
    items = (
        f"{_swatch(themed(colour, kind), chart.lines.get(name))}&nbsp;{escape(name)}"
        for name, colour in chart.legend.items()
    )
    return f"<small>{' &nbsp; '.join(items)}</small>"


def _swatch(colour: str, line: str | None) -> str:
    if line is None:
        return f'<span style="color:{colour}">&#9632;</span>'
    return f'<span style="display:inline-block;width:20px;vertical-align:3px;border-top:3px {line} {colour}"></span>'


if __name__ == "__main__":
    main()
