"""KV memory against context length and against concurrent requests, beside the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from minivllm.charts.chart import GREY, INK, SERIES, Chart

GIB = 2**30
DASHES = (0, (4, 3))


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """A model's memory in bytes, and the longest context it was made for, in tokens."""

    name: str
    kv_bytes_per_token: int
    weight_bytes: int
    max_model_len: int


def requests_that_outgrow_the_weights(model: ModelMemory, tokens: int) -> int:
    """The first number of requests of `tokens` tokens whose KV bytes exceed the weights."""
    return model.weight_bytes // (model.kv_bytes_per_token * tokens) + 1


def kv_memory_chart(
    models: Sequence[ModelMemory], *, tokens: int = 2048, max_tokens: int = 131_072,
    max_requests: int = 512,
) -> Chart:  # fmt: skip
    """Left: one request of growing length. Right: more and more requests of `tokens` tokens.

    Both axes are logarithmic, so a straight line is proportional growth. The dashed line in the
    same colour is what the weights take; a dot marks where K and V take more. On the left a line
    ends at the longest context that the model was made for.
    """
    model = models[0]
    count = requests_that_outgrow_the_weights(model, tokens)
    chart = Chart(
        f"{count} requests of {tokens:,} tokens need more KV memory than {model.name}'s weights",
        width=8.6,
        height=4.3,
        columns=2,
    )
    left, right = chart.panels
    _panel(left, models, 1, max_tokens, "context length of one request (tokens)")
    _panel(right, models, tokens, max_requests, f"concurrent requests of {tokens:,} tokens")
    left.set_ylabel("memory (GiB)")
    low, high = left.get_ylim()[0], right.get_ylim()[1]
    for axes in chart.panels:
        axes.set_ylim(max(low, 1e-3), high)
    lines = [Line2D([], [], color=color, lw=2) for _, color in zip(models, SERIES, strict=False)]
    names = [model.name for model in models]
    lines.append(Line2D([], [], color=INK, lw=1.2, ls=DASHES))
    chart.legend(lines, [*names, "weights"], loc="outside lower center", ncols=5, frameon=False)
    return chart


def _panel(
    axes: Axes, models: Sequence[ModelMemory], tokens: int, largest: int, label: str
) -> None:
    """tokens: the tokens that one unit of the x axis stands for."""
    start = 256 if tokens == 1 else 1
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for model, color in zip(models, SERIES, strict=False):
        per_unit = model.kv_bytes_per_token * tokens / GIB
        weights = model.weight_bytes / GIB
        stop = min(largest, model.max_model_len) if tokens == 1 else largest
        axes.plot([start, stop], [per_unit * start, per_unit * stop], color=color, lw=2)
        axes.plot([start, largest], [weights, weights], color=color, lw=1.2, ls=DASHES)
        crossing = weights / per_unit
        if start <= crossing <= stop:
            axes.plot([crossing], [weights], "o", color=color, ms=6)
            axes.annotate(
                f"{requests_that_outgrow_the_weights(model, tokens):,}",
                (crossing, weights), xytext=(5, -11), textcoords="offset points",
                color=INK, fontsize=8.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    axes.set_xlabel(label)
    axes.grid(True, which="major", color="#E4E4E4")
    axes.tick_params(which="minor", left=False, bottom=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.spines["left"].set_color(GREY)
