"""Waste by policy, the map of memory over time, and how many requests fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch, Rectangle

from minivllm.charts.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SERIES,
    SKY,
    VERMILION,
    Chart,
)

# The six shares, from the bottom of a bar up: (name, colour, hatch).
SHARES = (
    ("token", BLUE, ""),
    ("reserved", SKY, "//"),
    ("internal", ORANGE, ""),
    ("rounding", PURPLE, "\\\\"),
    ("external", VERMILION, "xx"),
    ("free", "#E4E4E4", ""),
)
# The paper's bars have one segment for rounding, holes and free space together.
OTHERS = ("external and others", GREY, "..")
POLICY_COLORS = {
    "reserve-max": VERMILION,
    "reserve-pow2": ORANGE,
    "reserve-oracle": GREEN,
    "grow": SKY,
    "paged": BLUE,
    "paged-gather": BLUE,
    "past_key_values": GREY,
}

# Share of KV memory in percent, as reported: Kwon et al., SOSP 2023, Figure 2.
PAPER_FIGURE_2 = {
    "reserve-max": {"token": 20.4, "reserved": 13.3, "internal": 57.3, OTHERS[0]: 8.9},
    "reserve-pow2": {"token": 26.8, "reserved": 17.9, "internal": 13.6, OTHERS[0]: 41.6},
    "reserve-oracle": {"token": 38.2, "reserved": 25.2, "internal": 0.0, OTHERS[0]: 36.6},
    "paged": {"token": 96.3},
}


def waste_chart(
    results: Sequence[tuple[str, dict[str, float]]],
    title: str,
    reported: Sequence[dict[str, float] | None] = (),
) -> Chart:
    """One stacked bar per policy; results: (label, percent by share), as `simulate` gives them.

    reported: beside each bar, narrower, somebody else's numbers; None leaves the place empty.
    """
    with_others = any(reported)
    chart = Chart(title, width=8.6, height=4.4)
    axes = chart.panels[0]
    for position, (label, share) in enumerate(results):
        _bar(axes, position - (0.17 if with_others else 0), 0.5 if with_others else 0.6, share)
        if position < len(reported) and (other := reported[position]) is not None:
            _bar(axes, position + 0.27, 0.26, other)
            axes.text(position + 0.27, 101, "paper", ha="center", va="bottom", fontsize=8)
        axes.text(position - (0.17 if with_others else 0), -4, label, ha="center", va="top")
    axes.set_xticks([])
    axes.set_xlim(-0.6, len(results) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the KV pool (%)")
    axes.grid(False, axis="x")
    segments = (*SHARES, OTHERS) if with_others else SHARES
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=n) for n, c, h in segments]
    chart.legend(handles=handles, loc="outside right center", frameon=False)
    return chart


def _bar(axes: Any, x: float, width: float, share: dict[str, float]) -> None:
    bottom = 0.0
    for name, color, hatch in (*SHARES, OTHERS):
        value = share.get(name, 0.0)
        if not value:
            continue
        axes.bar(
            x, value, width, bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0.5
        )
        if value >= 4:
            dark = color in (BLUE, VERMILION, PURPLE)
            axes.text(
                x, bottom + value / 2, f"{value:.1f}", ha="center", va="center", fontsize=8.5,
                color="white" if dark else INK,
                bbox={"facecolor": color, "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
        bottom += value


def memory_map_chart(
    pieces: Sequence[Any], total: int, title: str, blocked: Any | None = None
) -> Chart:
    """Addresses against time, coloured by request; what is white is a hole.

    pieces: with request, first_slot, num_slots, first_step, last_step (simulation.memory_map).
    blocked: with step, needs, free, largest_hole: the moment to mark.
    """
    chart = Chart(title, width=8.6, height=4.6)
    axes = chart.panels[0]
    for piece in pieces:
        axes.add_patch(
            Rectangle(
                (piece.first_step, piece.first_slot), piece.last_step - piece.first_step,
                piece.num_slots, facecolor=SERIES[piece.request % len(SERIES)], alpha=0.8,
                linewidth=0,
            )
        )  # fmt: skip
    last = max(piece.last_step for piece in pieces)
    if blocked is not None:
        axes.axvline(blocked.step, color=INK, lw=1.4, ls=(0, (3, 2)))
        axes.annotate(
            f"step {blocked.step}: the next request needs {blocked.needs:,}\n"
            f"free {blocked.free:,}, largest hole {blocked.largest_hole:,}",
            (blocked.step, total), xytext=(6, 4), textcoords="offset points", fontsize=8.5,
            va="bottom", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, last)
    axes.set_ylim(0, total)
    axes.set_xlabel("step")
    axes.set_ylabel("address (slot)")
    axes.grid(False)
    return chart


def concurrency_chart(lines: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Chart:
    """Requests running at once against the size of the pool; lines: policy -> (slots, requests)."""
    chart = Chart(title, width=7.6, height=4.0)
    axes = chart.panels[0]
    for position, (policy, points) in enumerate(lines.items()):
        slots, running = zip(*points, strict=True)
        axes.plot(
            slots, running, marker="osD^v*"[position % 6], lw=2, ms=5, label=policy,
            color=POLICY_COLORS.get(policy, SERIES[position % len(SERIES)]),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("KV pool (slots)")
    axes.set_ylabel("requests running at once")
    axes.legend(frameon=False)
    return chart


def running_chart(lines: Mapping[str, tuple[Sequence[float], Sequence[int]]], title: str) -> Chart:
    """Requests running over time; lines: stage -> (seconds, requests) after each step."""
    chart = Chart(title, width=8.6, height=3.4)
    axes = chart.panels[0]
    for position, (stage, (seconds, running)) in enumerate(lines.items()):
        color = POLICY_COLORS.get(stage, SERIES[position % len(SERIES)])
        axes.step(
            [0, *seconds],
            [running[0], *running],
            where="pre",
            color=color,
            lw=1.8,
            label=stage,
            ls=("-", (0, (5, 1.5)), (0, (1.5, 1)))[position % 3],
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests running")
    axes.legend(frameon=False, loc="upper right")
    return chart
