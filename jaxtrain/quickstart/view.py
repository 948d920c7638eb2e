"""The live view: a panel on a terminal, else a line a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain.quickstart.progress import RunProgress

PHASES = {
    "starting": "starting: compiling, building the tokenizer",
    "resuming": "resuming: compiling, restoring the checkpoint, step",
    "warm_start": "warm start on worked answers",
    "first_rollouts": "first version out; workers start, evaluate and roll out",
    "rl": "asynchronous RL",
    "done": "finishing: last evaluation",
}
LINE_EVERY_S = 5.0


@contextmanager
def live_view(
    read: Callable[[], RunProgress], *, name: str, console: Console
) -> Iterator[Callable[[], None]]:
    """Yields a function to call at short intervals.

    On a terminal it redraws the panel. Elsewhere it prints a line when the step changes, at most one every
    few seconds, and at every change of phase.
    """
    started = time.monotonic()
    if not console.is_terminal:
        yield _line_printer(read, console, started)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda: live.update(panel(read(), name=name, elapsed_s=time.monotonic() - started))


def _line_printer(read: Callable[[], RunProgress], console: Console, started: float) -> Callable[[], None]:
    shown = RunProgress(phase="")
    shown_at = float("-inf")

    def tick() -> None:
        nonlocal shown, shown_at
        now, at = read(), time.monotonic()
        if now.phase != shown.phase or (now.step != shown.step and at - shown_at >= LINE_EVERY_S):
            console.print(line(now, elapsed_s=at - started), highlight=False, soft_wrap=True)
            shown, shown_at = now, at

    return tick


def line(now: RunProgress, *, elapsed_s: float) -> str:
    """`[1:05] rl 12/40  reward 0.61  lag 1.2 (max 3)  ...`, only what is known."""
    head = f"[{clock(elapsed_s)}] {PHASES[now.phase]}"
    if now.steps:
        head += f" {now.step}/{now.steps}"
    return "  ".join([head, *(f"{label} {value}" for label, value in facts(now))])


def facts(now: RunProgress) -> list[tuple[str, str]]:
    """(label, value) of everything known, in the order shown."""
    found: list[tuple[str, str]] = []
    if now.loss is not None:
        found.append(("loss", f"{now.loss:.3f}"))
    if now.reward is not None:
        found.append(("reward", f"{now.reward:.3f}"))
    if now.lag_mean is not None:
        found.append(("lag", f"{now.lag_mean:.2f} (max {now.lag_max or 0:.0f})"))
    if now.version is not None:
        found.append(("version", str(now.version)))
    if now.delta_bytes:
        ratio = f" ({now.delta_bytes / now.reference_bytes:.2f}x entropy)" if now.reference_bytes else ""
        found.append(("delta", f"{kilobytes(now.delta_bytes)}{ratio}"))
    if now.tokens_per_s is not None:
        found.append(("tokens/s", f"{now.tokens_per_s:,.0f}"))
    if now.seconds_left is not None:
        found.append(("left", clock(now.seconds_left)))
    return found


def panel(now: RunProgress, *, name: str, elapsed_s: float) -> Panel:
    """The same facts, with a bar of the phase."""
    table = Table.grid(padding=(0, 2))
    for label, value in [("elapsed", clock(elapsed_s)), *facts(now)]:
        table.add_row(Text(label, style="dim"), value)
    steps = f" {now.step}/{now.steps}" if now.steps else ""
    bar = ProgressBar(total=now.steps or 1, completed=now.step, width=40)
    return Panel(Group(Text(PHASES[now.phase] + steps, style="bold"), bar, table), title=name, width=64)


def clock(seconds: float) -> str:
    """`1:05`, or `1:02:05` past the hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def kilobytes(count: float) -> str:
    """Decimal units, three digits: `12.3 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
