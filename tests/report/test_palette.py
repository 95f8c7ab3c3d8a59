"""Colours of one picture stay distinct under the common colour blindnesses, simulated."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from pstar_sim.policy.registry import built_in
from pstar_sim.report.palette import BINDS, CATEGORIES, ON_DARK, PHASES, POLICIES, SPARE, STEPS, WAITS, policy_colours
from pstar_sim.report.paper import PAPER
from pstar_sim.report.sweeps import words_colour
from pstar_sim.report.web.charts import THEMES, themed

LEAST = 10.0  # CIE76; about 2 are just told apart side by side, larger areas of a picture lie apart
SEEN = {  # of linear RGB, severity 1.0: Machado, Oliveira, Fernandes 2009, table 1
    "normal": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(axis=1)
ON_LANES = [*PHASES.values(), *(colour for _, colour, _ in STEPS.values())]
PICTURES = {
    "categories": [*CATEGORIES.values(), *PHASES.values(), "#FFFFFF"],
    "steps": [*PHASES.values(), *(colour for _, colour, _ in STEPS.values())],
    **{f"lanes of a {name} page": [*themed(ON_LANES, name), theme["@paper"]] for name, theme in THEMES.items()},
    **{f"waits of a {name} page": themed([*WAITS.values()], name) for name in THEMES},
    "binds": BINDS.values(),
    "policies": [*POLICIES.values(), *SPARE],
}


def lab(colour: str, seen: str) -> NDArray[np.float64]:
    """The colour as it is seen, in CIE L*a*b*."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = XYZ @ np.clip(np.array(SEEN[seen]) @ linear, 0.0, 1.0) / WHITE
    f = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_the_distance_of_black_and_white_is_100() -> None:
    assert np.linalg.norm(lab("#FFFFFF", "normal") - lab("#000000", "normal")) == pytest.approx(100.0, abs=0.1)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("picture", PICTURES)
def test_no_two_colours_of_a_picture_look_alike(picture: str, seen: str) -> None:
    colours: Iterable[str] = dict.fromkeys(PICTURES[picture])
    near = {pair: float(np.linalg.norm(lab(pair[0], seen) - lab(pair[1], seen))) for pair in combinations(colours, 2)}
    assert min(near.values()) >= LEAST, min(near, key=lambda pair: near[pair])


def test_each_policy_of_a_picture_has_a_colour_of_its_own() -> None:
    variants = ["tide:pins=0", "tide", "optimal:order=relay", "tide:capacity=peak"]
    own = policy_colours([*variants, *built_in()])
    assert len({*policy_colours(built_in())}) == len(built_in())
    assert own[1] == POLICIES["tide"] not in (own[0], own[3])
    assert policy_colours(["optimal:order=relay"]) == [POLICIES["optimal"]] != policy_colours(variants[:1])
    assert len({*policy_colours(variants)}) == len(variants)


@pytest.mark.parametrize("paper", ["#FFFFFF", "#000000"])
def test_colours_of_policies_are_seen_on_every_paper(paper: str) -> None:
    far = {c: np.linalg.norm(lab(c, seen) - lab(paper, seen)) for c in (*POLICIES.values(), *SPARE) for seen in SEEN}
    assert min(far.values()) >= 2 * LEAST, far


def contrast(one: str, other: str) -> float:
    """Of WCAG 2: 4.5 is enough for text, 3 for a picture."""

    def luminance(colour: str) -> float:
        rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return float(XYZ[1] @ linear)

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [THEMES["dark"]["@paper"], PAPER])
def test_dark_paper_hides_no_step_and_no_wait(paper: str) -> None:
    colours = themed([*(colour for _, colour, _ in STEPS.values()), *WAITS.values()], "dark")
    assert min((contrast(colour, paper), colour) for colour in colours) >= (3.0, "")


def test_what_is_written_on_a_bar_can_be_read() -> None:
    inks = {"black": "#000000", "white": "#FFFFFF"}
    on_steps = [*((colour, ink) for _, colour, ink in STEPS.values()), *ON_DARK.values()]
    on_steps += [(colour, "white" if name == "ADAM" else "black") for name, colour in PHASES.items()]
    on_fields = [(colour, words_colour(name)) for name, colour in BINDS.items()]
    for colour, ink in (*on_steps, *on_fields):
        assert contrast(colour, inks[ink]) >= 4.5, (colour, ink)
