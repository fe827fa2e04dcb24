"""Chart: a figure in the course's style, which needs no display."""

import io
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.errors import RequestError

# Okabe and Ito's palette: told apart with any colour vision. A meaning keeps its colour.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, INK = "#56B4E9", "#CC79A7", "#999999", "#222222"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "svg.hashsalt": "minivllm",
}


class Chart(Figure):
    """Draw on its `panels`; a notebook shows it, save() writes it. The title states the finding."""

    def __init__(
        self,
        title: str,
        *,
        width: float = 7.6,
        height: float = 3.6,
        columns: int = 1,
        rows: int = 1,
    ) -> None:
        with rc_context(STYLE):
            super().__init__(figsize=(width, height), layout="constrained")
            made = self.subplots(rows, columns, squeeze=False, sharex=rows > 1)
        self.panels: list[Axes] = list(made.flat)
        self.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold")

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self._write(buffer, "png")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Writes a .png or .svg file, the same bytes for the same figure."""
        suffix = Path(path).suffix
        if suffix not in (".png", ".svg"):
            raise RequestError(f"cannot write {path}: a figure's name must end in .png or .svg")
        self._write(path, suffix[1:])

    def _write(self, target: str | Path | io.BytesIO, kind: str) -> None:
        # The version and the date of the library would change the file without the figure.
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        with rc_context(STYLE):
            self.savefig(target, format=kind, metadata=metadata)
