"""What the size of a block trades, and how a pool fills and empties over time."""

from collections.abc import Sequence

from minivllm.charts.chart import BLUE, GREY, INK, ORANGE, VERMILION, Chart


def block_size_chart(points: Sequence[tuple[int, float, float, float]], title: str) -> Chart:
    """Three panels over the block size.

    points: (block size in slots, percent of the pool held and empty, mean entries of a block
        table, blocks given out per 1,000 generated tokens).
    """
    chart = Chart(title, width=9.6, height=3.4, columns=3)
    sizes, *series = zip(*points, strict=True)
    labels = (
        "held and empty (% of the pool)",
        "entries of a block table (mean)",
        "blocks given out per 1,000 tokens",
    )
    for axes, values, label, color, marker in zip(
        chart.panels, series, labels, (VERMILION, BLUE, ORANGE), "osD", strict=True
    ):
        axes.plot(sizes, values, color=color, marker=marker, ms=4.5, lw=1.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xticks(sizes[::2])
        axes.set_xlabel("block size (slots)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        for position, size in enumerate(sizes):
            if size == 16:
                axes.annotate(
                    f"16: {values[position]:,.1f}", (size, values[position]), xytext=(-8, 14),
                    textcoords="offset points", fontsize=8.5, color=INK,
                )  # fmt: skip
    return chart


def memory_timeline_chart(
    free: Sequence[int],
    running: Sequence[int],
    waiting: Sequence[int],
    preempted: Sequence[int],
    title: str,
    total: int,
) -> Chart:
    """Free slots, requests running and waiting, preemptions so far; one number per step each.

    total: slots of the pool.
    """
    chart = Chart(title, width=8.6, height=5.0, rows=3)
    above, middle, below = chart.panels
    steps = range(1, len(free) + 1)
    above.fill_between(steps, [100 * f / total for f in free], color=GREY, step="post", lw=0)
    above.set_ylabel("free (% of the pool)")
    above.set_ylim(0, 100)
    middle.plot(steps, running, color=BLUE, lw=1.6, label="running")
    middle.plot(steps, waiting, color=ORANGE, lw=1.6, ls=(0, (4, 1.5)), label="waiting")
    middle.set_ylabel("requests")
    middle.set_ylim(bottom=0)
    middle.legend(loc="lower right", bbox_to_anchor=(1, 0.96), ncols=2, frameon=False)
    below.step(steps, preempted, color=VERMILION, lw=1.6, where="post")
    below.set_ylabel("preempted so far")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    below.set_xlim(1, len(free))
    chart.align_ylabels(chart.panels)
    return chart
