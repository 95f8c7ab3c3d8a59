"""Colours of all pictures and pages: Okabe and Ito's and neighbours, distinct under common colour blindness; names of
queues."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

from pstar_sim.core.step import Kind, Queue

GREEN, BLUE, ORANGE, PINK = "#009E73", "#0072B2", "#E69F00", "#CC79A7"
SKY, VERMILION, YELLOW, WINE, GREY = "#56B4E9", "#D55E00", "#F0E442", "#882255", "#999999"

CATEGORIES = {"states": GREEN, "param": BLUE, "grad": ORANGE, "chunks": VERMILION, "buffer": PINK, "non-model": SKY}
"""Category of bytes -> colour; in grey, the order of the stack tells them apart."""

CATEGORY_NAMES = {
    "states": "optimizer states",
    "param": "parameters",
    "grad": "gradients",
    "chunks": "chunks (parameters, gradients, states)",
    "buffer": "buffers",
    "non-model": "non-model (the tide)",
}
"""Category of bytes -> its name in a picture."""

PHASES = {"FWD": "#DDDDDD", "BWD": "#787878", "BWD + recompute": "#787878", "RECOMPUTE": "#BDBDBD", "ADAM": "#5A5A5A"}

STEPS = {
    Kind.FETCH: ("fetch", BLUE, "white"),
    Kind.WRITEBACK: ("write-back", ORANGE, "black"),
    Kind.CPU_UPDATE: ("Adam on the CPU", GREEN, "black"),
    Kind.GPU_UPDATE: ("Adam on the GPU", "#004D38", "white"),
    Kind.CPU_ADD: ("gradients added on the CPU", YELLOW, "black"),
    Kind.GATHER: ("gather", SKY, "black"),
    Kind.REDUCE_SCATTER: ("reduce-scatter", PINK, "black"),
    Kind.NVME_READ: ("read from disk", VERMILION, "black"),
    Kind.NVME_WRITE: ("write to disk", "#8C3D00", "white"),
    Kind.STASH_OUT: ("activations out", "#999933", "black"),
    Kind.STASH_IN: ("activations in", "#AA66FF", "black"),
    Kind.SEND: ("to another stage", "#117733", "white"),
    Kind.RECEIVE: ("from another stage", "#4800C0", "white"),
}
"""Kind of step -> its name in a legend, its colour, and the colour of what is written on it."""

ON_DARK = {
    "#004D38": ("#AAEE99", "black"),
    "#8C3D00": ("#8A6642", "white"),
    "#117733": ("#39C668", "black"),
    "#4800C0": ("#7E47EB", "white"),
    WINE: ("#C63980", "white"),
    "#332211": ("#EBE0D6", "black"),
}
"""Colour that a dark paper would hide -> the colour there, and that of what is written on it."""

BINDS = {
    "compute": GREEN,
    "adam": VERMILION,
    "h2d": SKY,
    "d2h": BLUE,
    "link": BLUE,
    "dram": ORANGE,
    "barrier": VERMILION,
    "net": YELLOW,
    "nvme": WINE,
    "nvme_write": WINE,
    "send": GREY,
    "receive": GREY,
    "stages": GREY,
}
"""Resource that binds -> colour."""

QUEUE_NAMES = {
    Queue.COMPUTE: "compute",
    Queue.H2D: "host to GPU",
    Queue.D2H: "GPU to host",
    Queue.ADAM: "CPU Adam",
    Queue.NET: "collectives",
    Queue.NVME: "disks",
    Queue.NVME_WRITE: "writes to disks",
    Queue.SEND: "sends",
    Queue.RECEIVE: "receives",
}
"""Queue -> its name in a picture, in the order of the rows."""

WAITS = {
    "adam": GREEN,
    "h2d": BLUE,
    "d2h": ORANGE,
    "net": SKY,
    "nvme": VERMILION,
    "nvme_write": VERMILION,
    "barrier": WINE,
    "dram": YELLOW,
    "compute": GREY,
    "send": "#117733",
    "receive": "#4800C0",
    "stages": "#332211",
}
"""Cause of a wait -> colour of the steps that cause such waits."""

POLICIES = {
    "all_on_gpu": "#777777",
    "zero_offload": ORANGE,
    "static_partition": PINK,
    "patrickstar": SKY,
    "tide": BLUE,
    "optimal": GREEN,
}
SPARE = (VERMILION, YELLOW, "#AA66FF", WINE, "#F5A6C9", "#AAEE88", "#220088", "#442200")
"""Colours of policies without a colour of their own, as many as there are."""


def policy_colours(policies: Iterable[str]) -> list[str]:
    """In one picture: up to eight policies without a colour of their own differ, and one with options has its name's if
    free."""
    names = list(policies)
    taken = {POLICIES[name] for name in names if name in POLICIES}
    spare = cycle(SPARE)
    colours = []
    for name in names:
        own = POLICIES.get(name.partition(":")[0])
        if own is None or (name not in POLICIES and own in taken):
            own = next(spare)
        taken.add(own)
        colours.append(own)
    return colours
