"""What a kernel saves that reads in place."""

from collections.abc import Sequence

from minivllm.charts.chart import BLUE, ORANGE, Chart


def bytes_chart(contexts: Sequence[int], kv_bytes: Sequence[int], title: str) -> Chart:
    """Bytes moved by a decode step of one layer: K and V once, or read, written and read again.

    contexts: tokens of the sequence; kv_bytes: its K and V in one layer.
    """
    chart = Chart(title, width=7.2, height=3.2)
    axes = chart.panels[0]
    for offset, factor, color, label in (
        (-0.2, 1, BLUE, "read in place"),
        (0.2, 3, ORANGE, "gather, then read"),
    ):
        for position, count in enumerate(kv_bytes):
            value = factor * count / 2**20
            axes.bar(position + offset, value, 0.38, color=color, label=None if position else label)
            axes.text(
                position + offset, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=9
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xticks(range(len(contexts)), [f"{tokens:,}" for tokens in contexts])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB moved in one layer")
    axes.grid(False, axis="x")
    axes.legend(loc="upper left", frameon=False)
    return chart
