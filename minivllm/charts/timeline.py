"""Who waits, prefills and decodes in each step; and the KV bytes that they hold meanwhile."""

from collections.abc import Sequence

from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minivllm.charts.chart import BLUE, GREY, INK, ORANGE, SERIES, Chart

# What a request can do in a step, as (colour, hatch): readable in grey, too.
KINDS = {"wait": ("#E8E8E8", None), "prefill": (ORANGE, None), "decode": (BLUE, None)}


def timeline_chart(
    rows: dict[str, Sequence[tuple[str, int] | None]], title: str, budget: int | None = None
) -> Chart:
    """One row per request, one column per step.

    rows: name -> for each step (kind, tokens), kind in `wait`, `prefill`, `decode`; None before
        the request arrived and after it ended.
    budget: the token budget, noted on the step axis.
    """
    num_steps = max(len(cells) for cells in rows.values())
    chart = Chart(title, width=8.6, height=1.1 + 0.36 * len(rows))
    axes = chart.panels[0]
    used = [0] * num_steps
    for row, cells in enumerate(rows.values()):
        for step, cell in enumerate(cells):
            if cell is None:
                continue
            kind, tokens = cell
            color, hatch = KINDS[kind]
            axes.add_patch(
                Rectangle((step + 0.04, row - 0.42), 0.92, 0.84, facecolor=color, hatch=hatch)
            )
            used[step] += tokens
            if tokens:
                axes.text(
                    step + 0.5, row, f"{tokens}", ha="center", va="center", fontsize=8,
                    color="white" if kind == "decode" else INK,
                )  # fmt: skip
    for step, tokens in enumerate(used):
        axes.text(step + 0.5, len(rows) - 0.3, f"{tokens}", ha="center", va="center", fontsize=8)
    of_budget = "" if budget is None else f" (of {budget})"
    axes.text(-0.1, len(rows) - 0.3, f"sum{of_budget}", ha="right", va="center", fontsize=8.5)
    axes.set_xlim(0, num_steps)
    axes.set_ylim(len(rows) + 0.1, -0.6)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(
        [step + 0.5 for step in range(num_steps)], [str(s + 1) for s in range(num_steps)]
    )
    axes.set_xlabel("step; the number in a cell is the tokens computed")
    axes.tick_params(length=0)
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(
        handles=[Patch(facecolor=color, label=kind) for kind, (color, _) in KINDS.items()],
        loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2,
        frameon=False, fontsize=8.5,
    )  # fmt: skip
    return chart


def held_bytes_chart(held: dict[str, Sequence[int]], title: str) -> Chart:
    """KV bytes held after each step's forward pass, one layer per request.

    held: name -> bytes in each step; all of the same length.
    """
    chart = Chart(title, width=8.6, height=3.6)
    axes = chart.panels[0]
    num_steps = len(next(iter(held.values())))
    colors = [SERIES[i % len(SERIES)] for i in range(len(held))]
    mib = [[count / 2**20 for count in row] for row in held.values()]
    axes.stackplot(
        range(1, num_steps + 1), mib, step="post", colors=colors, alpha=0.85,
        edgecolor="white", linewidth=0.6,
    )  # fmt: skip
    total = [sum(column) for column in zip(*mib, strict=True)]
    for row, name in enumerate(held):
        step = next((s for s in range(num_steps) if mib[row][s] > 0), None)
        if step is not None:  # the name stands where its layer begins
            below = sum(mib[other][step] for other in range(row))
            axes.text(step + 1.6, below + mib[row][step] / 2, name, va="center", fontsize=8.5)
    peak = max(range(num_steps), key=total.__getitem__)
    axes.annotate(
        f"{total[peak]:.1f} MiB", (peak + 1, total[peak]), xytext=(6, 8),
        textcoords="offset points", color=INK, fontsize=9,
        arrowprops={"arrowstyle": "-", "color": GREY},
    )  # fmt: skip
    axes.set_xlim(1, num_steps)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max(total) * 1.18)
    axes.set_xlabel("step")
    axes.set_ylabel("KV bytes held (MiB)")
    return chart


def throughput_chart(rows: Sequence[tuple[int, float, float]], title: str) -> Chart:
    """Tokens/s one pass per sequence and in one batched pass; rows: (sequences, one, batched)."""
    chart = Chart(title, width=6.4, height=3.2)
    axes = chart.panels[0]
    for position, (_, alone, batched) in enumerate(rows):
        for offset, value, color in ((-0.2, alone, ORANGE), (0.2, batched, BLUE)):
            axes.bar(position + offset, value, width=0.38, color=color)
            axes.text(
                position + offset, value, f"{value:.0f}", ha="center", va="bottom", fontsize=9
            )
    axes.set_xticks(range(len(rows)), [f"{count}" for count, _, _ in rows])
    axes.set_xlabel("sequences")
    axes.set_ylabel("decode tokens/s")
    axes.grid(False, axis="x")
    axes.legend(
        handles=[
            Patch(facecolor=ORANGE, label="one forward pass per sequence"),
            Patch(facecolor=BLUE, label="one forward pass for all"),
        ],
        loc="upper left",
        frameon=False,
    )
    return chart
