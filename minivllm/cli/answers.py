"""AnswersView: several answers growing at the same time."""

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from minivllm.engine import Increment

TAIL = 400  # characters of an unfinished answer that a terminal shows


class AnswersView:
    """On a terminal every answer grows in its place; elsewhere each is printed when it ends.

    labels: what to call each answer; default: its number.
    """

    def __init__(self, count: int, labels: list[str] | None = None) -> None:
        self.labels = labels or [f"[{number}]" for number in range(1, count + 1)]
        self.texts = [""] * count
        self.running = set(range(count))
        self.console = Console()
        self._live = Live(
            get_renderable=self._render, console=self.console, transient=True, auto_refresh=True
        )

    def __enter__(self) -> "AnswersView":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def add(self, position: int, increment: Increment) -> None:
        self.texts[position] += increment.text
        if increment.stop_reason is not None:
            self.running.discard(position)
            self.console.print(self._answer(position), soft_wrap=not self.console.is_terminal)

    def _answer(self, position: int, tail: int | None = None) -> Text:
        text = self.texts[position].strip()
        if tail is not None and len(text) > tail:
            text = "... " + text[-tail:]
        return Text.assemble((f"{self.labels[position]} ", "bold"), text, "\n")

    def _render(self) -> Group:
        rows = max(1, len(self.running))
        share = max(80, self.console.width * (self.console.height - 4) // (rows + 1) - 80)
        return Group(*(self._answer(p, min(TAIL, share)) for p in sorted(self.running)))
