"""Predictions for other frameworks' configurations, host memory first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pstar_sim.report.capacity_tables import shown_on_card
from pstar_sim.report.phases import short_phases
from pstar_sim.report.tables import format_size
from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.units import format_error, format_s

if TYPE_CHECKING:
    from pstar_sim.frameworks.express import Expressed
    from pstar_sim.frameworks.prediction import ConfigurationPrediction

_HEADS = (
    "configuration",
    "fits",
    "host needs",
    "host has",
    "rounding",
    "GPU needs",
    "GPU has",
    "iteration",
    "tokens/s",
)


def predictions_text(predictions: Sequence[ConfigurationPrediction], *, width: int | None = None) -> str:
    """A table, and of each the parts of its host memory, why it does not fit, its policy, and what is not modelled."""
    width = terminal_width() if width is None else width
    lines = [table_text(_HEADS, [_cells(p) for p in predictions], width=width).rstrip()]
    for p in predictions:
        lines += ["", *(line for text in _said(p) for line in wrap(text, width))]
    return "\n".join(lines) + "\n"


def _cells(p: ConfigurationPrediction) -> tuple[str, ...]:
    return (
        p.label,
        "yes" if p.fits else f"no: {p.short_of}" if p.short_of else "no",
        format_size(p.host.host_bytes),
        format_size(p.host_available_bytes),
        format_size(p.host.rounding_bytes),
        format_size(p.gpu_needed_bytes),
        format_size(p.gpu_available_bytes),
        "" if p.iteration_s is None else format_s(p.iteration_s),
        "" if p.tokens_per_s is None else f"{p.tokens_per_s:,.0f}",
    )


def _said(p: ConfigurationPrediction) -> list[str]:
    said = [f"{p.label}: host memory per GPU: {', '.join(p.host.parts()) or 'none'}."]
    fit = p.as_fit()
    said += [f"{p.label}: {sentence}" for sentence in shown_on_card(fit)] if p.fits else []
    said += [f"{p.label}: {sentence}" for sentence in short_phases(fit, p.machine.host)]
    if p.reason is not None:
        said.append(f"{p.reason}.")
    error = "" if p.expected_error is None else f" ({format_error(p.expected_error)})"
    said.append(f"{p.label}: {p.configuration.framework}, predicted by its own policy {p.policy}{error}.")
    said += [f"{p.label}: {note}." for note in p.configuration.notes]
    if p.configuration.without_effect:
        said.append(f"{p.label}: without effect on memory and time: {', '.join(p.configuration.without_effect)}.")
    return said


def export_text(
    path: str, expressed: Expressed, prediction: ConfigurationPrediction, *, width: int | None = None
) -> str:
    """What a written file states and cannot, then its prediction."""
    width = terminal_width() if width is None else width
    texts = [
        f"{path}: {expressed.configuration.framework}: {'; '.join(expressed.says)}.",
        *(f"cannot express: {what}." for what in expressed.cannot),
    ]
    lines = [line for text in texts for line in wrap(text, width)]
    return "\n".join(lines) + "\n\n" + predictions_text([prediction], width=width)
