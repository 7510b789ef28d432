"""`Report`: what a run planned, used and did, as a dict, and as a page that needs nothing from elsewhere."""

import json
import pickle
import platform
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_cxl.config import SSD
from lightning_cxl.machine.recorder import WORDS
from lightning_cxl.text import format_bytes
from lightning_cxl.timing import Span

TIER_HEADS, ROLE_HEADS = ("tier", "capacity", "budget", "used", "peak"), ("role", "tier", "planned", "used", "peak")
Samples = Sequence[tuple[float, Mapping[str, int]]]  # bytes by what holds them, by the time of day

_COLOURS = {  # by the first words of a span
    "forward": "#4878d0", "recompute": "#82c6e2", "fetch": "#6acc64", "gradients": "#956cb4", "update": "#ee854a",
    "wait": "#d65f5f", "copy": "#2a7f62", "save": "#8c613c", "step": "#d5bb67",
    "tiers": "#4878d0", "rest": "#956cb4", "children": "#ee854a",
}  # fmt: skip
_STALLS = {
    "stall_update_s": "The update on the host limits the step. Fewer bytes help (`state='bf16'` or `'8bit'`), more "
    "`num_threads`, and `overlap_step` where it is off",
    "stall_gradients_s": "Gradients on their way to the host, and their sums, limit the step. More tokens per step "
    "help, and larger micro-batches in place of many",
    "stall_ssd_s": "Drives limit the step. More memory for what is on the tier `ssd` helps, and more drives",
}
_NUMBER = r"-|[\d.,e-]+( s| \w*B)?"
_STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;
overflow-wrap:break-word}table{border-collapse:collapse;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}.n{text-align:right;white-space:nowrap}
tr{border-bottom:1px solid #8884}h2{margin-top:2rem}.key span{display:inline-block;margin-right:1rem}
svg{width:100%;min-width:52rem;height:auto}svg text{fill:currentColor;font-size:14px}.wide{margin:1rem 0}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;print-color-adjust:exact}
@media print{body{margin:0;max-width:none}h2,.key{break-after:avoid}svg{min-width:0}}
"""

_HEAD = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>lightning_cxl</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{_STYLE}</style>"""


class Report(dict[str, Any]):
    """The keys of `Session.report`, and what `save` shows besides: a step on average, the last one, and memory."""

    def __init__(
        self, content: Mapping[str, Any], per_step: Mapping[str, float], last_step: Sequence[Span], samples: Samples
    ) -> None:
        super().__init__(content)
        self._per_step, self._last_step, self._samples = per_step, last_step, samples

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page, and beside it the last step as ``.trace.json``, for Perfetto or ``chrome://tracing``.

        ``.memory.pickle`` has host memory, for ``torch.cuda._memory_viz`` and https://docs.pytorch.org/memory_viz.
        """
        path = Path(path)
        path.write_text(self._page(), encoding="utf-8", errors="replace")
        events = [
            {"name": name, "ph": "X", "pid": 0, "tid": thread, "ts": begin * 1e6, "dur": (end - begin) * 1e6}
            for name, thread, begin, end in self._last_step
        ]
        path.with_suffix(".trace.json").write_text(json.dumps({"traceEvents": events}))
        # the page of memory_viz reads no newer protocol
        path.with_suffix(".memory.pickle").write_bytes(pickle.dumps(self._snapshot(), protocol=4))

    def _snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` would: segments as large as roles were at most on a tier."""
        segments, at = [], 0  # addresses are invented
        for role, tiers in self["peak_roles"].items():
            for tier, peak in tiers.items():
                own = {"stream": 0, "frames": [{"filename": "", "line": 0, "name": f"{tier}:{role}"}]}
                used = self["roles"].get(role, {}).get(tier, 0)
                parts = [(at, used, "active_allocated"), (at + used, peak - used, "inactive")]
                blocks = [
                    {"address": begin, "size": size, "requested_size": size, "state": state, **own}
                    for begin, size, state in parts
                    if size
                ]
                sizes = {"total_size": peak, "allocated_size": used, "active_size": used, "requested_size": used}
                segments.append({"address": at, "device": 0, "segment_type": f"{tier}:{role}", "blocks": blocks})
                segments[-1] |= {**own, **sizes}
                at += peak
        return {"segments": [each for each in segments if each["total_size"]], "device_traces": [[]]}

    def _page(self) -> str:
        parts = [
            f"<h1>Training run</h1><p>{escape(' '.join(sys.argv))}</p>",
            _table([], [[key, value] for key, value in self._facts().items()]),
            "<h2>What limits the step</h2>",
            f"<p>{escape(self._limit())}</p>",
            _table(["of one step, on average", ""], [[name, _number(name, x)] for name, x in self._per_step.items()]),
            *(["<h2>The last step</h2>", _lanes(self._last_step)] if self._last_step else []),
            "<h2>Memory</h2>",
            _table(ROLE_HEADS, role_rows(self)),
            _table(TIER_HEADS, tier_rows(self)),
            *(["<h2>The last minute</h2>", _chart(self._samples)] if len(self._samples) > 1 else []),
            "<h2>Who decided</h2>",
            _table(["role", ""], [[role, text] for role, texts in self["reasons"].items() for text in texts]),
            _table([], [[f"optimizer: {each}"] for each in self["optimizers"]] + [[each] for each in self["notes"]]),
            "<h2>Options</h2>",
            _table(["option", "value", "from"], self._options()),
        ]
        return "\n".join([_HEAD, *parts, "</html>\n"])

    def _facts(self) -> dict[str, Any]:
        packages = {name: sys.modules.get(name) for name in ("lightning_cxl", "torch", "lightning", "transformers")}
        return {
            "state": f"{self['state']}, {time.strftime('%Y-%m-%d %H:%M')}",
            "machine": f"{platform.node()}, {platform.machine()}, Python {platform.python_version()}",
            "versions": ", ".join(f"{name} {each.__version__}" for name, each in packages.items() if each is not None),
            "device": self["device"],
            "parameters": f"{self['num_parameters']:,} ({self['num_trainable']:,} trained)",
            "policy": self["policy"],
        }

    def _options(self) -> list[list[str]]:
        options = self["config"].items()
        return [[name, json.dumps(each["value"], default=str), each["origin"]] for name, each in options]

    def _limit(self) -> str:
        step_s = self._per_step.get("step_s", 0.0)
        name, seconds = max(((each, self._per_step.get(each, 0.0)) for each in _STALLS), key=lambda pair: pair[1])
        if not step_s:
            return "No step has ended."
        if seconds < 0.05 * step_s:
            return (
                "Nothing of the offload: less than 5 % of a step was waiting for updates, gradients or drives. The "
                "rest is the model, the data loader, validation and checkpoints."
            )
        return f"{_STALLS[name]}. The training waited {seconds:.3g} s of {step_s:.3g} s for it."


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


def tier_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    keys = ("capacity_bytes", "budget_bytes", "used_bytes", "peak_bytes")
    return [(name, *(_size(tier[key]) for key in keys)) for name, tier in report["tiers"].items()]


def role_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    kinds = [report[key] for key in ("planned_roles", "roles", "peak_roles")]
    rows = []
    for role in dict.fromkeys(role for kind in kinds for role in kind):
        planned, *counted = (kind.get(role, {}) for kind in kinds)
        for tier in dict.fromkeys([*planned, *counted[1]]):
            unused = None if tier == SSD else 0  # on the tier `ssd` roles are not counted one by one
            rows.append((role, tier, *map(_size, (planned.get(tier), *(each.get(tier, unused) for each in counted)))))
    return rows


def _number(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:.3g} s" if name.endswith("_s") else f"{value:.3g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    texts = [[*map(str, cells)] for cells in rows]
    classes = [" class=n" * all(re.fullmatch(_NUMBER, text) for text in each) for each in zip(*texts, strict=True)]

    def row(cells: Sequence[str], kind: str) -> str:
        pairs = zip(cells, classes, strict=True)
        return "<tr>" + "".join(f"<{kind}{of_kind}>{escape(text)}</{kind}>" for text, of_kind in pairs)

    body = "".join(row(cells, "td") for cells in texts)
    return f'<div class="wide"><table>{row(heads, "th") if heads else ""}{body}</table></div>' if body else ""


def _drawing(names: Iterable[str], parts: Iterable[str], height: int) -> str:
    key = "".join(f'<span><i style="background:{_COLOURS[name]}"></i>{WORDS.get(name, name)}</span>' for name in names)
    svg = f'<svg viewBox="0 0 1000 {height}" role="img">{"".join(parts)}</svg>'
    return f'<p class="key">{key}</p><div class="wide">{svg}</div>'


def _lanes(spans: Sequence[Span]) -> str:
    """Draw what each thread did, and the device, a lane for each."""
    begin, end = min(each.begin for each in spans), max(each.end for each in spans)
    scale, drawn, kinds, y = 1000 / max(end - begin, 1e-9), [], dict[str, None](), 0
    for thread in sorted({each.thread for each in spans}, key=lambda each: (not each.startswith("device: "), each)):
        drawn.append(f'<text x="0" y="{y + 12}">{escape(thread)}</text>')
        own = [each for each in spans if each.thread == thread]
        for each in sorted(own, key=lambda each: (each.begin, -each.end)):  # what is inside of another one lies on it
            kind = next((kind for kind in _COLOURS if each.name.startswith(kind)), "step")
            kinds[kind] = None
            x, width = (each.begin - begin) * scale, max(0.5, (each.end - each.begin) * scale)
            title = f"{escape(each.name)}: {(each.end - each.begin) * 1e3:.2f} ms"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 16}" width="{width:.1f}" height="18" fill="{_COLOURS[kind]}">'
                f"<title>{title}</title></rect>"
            )
        y += 42
    drawn.append(f'<text x="1000" y="{y + 8}" text-anchor="end">{(end - begin) * 1e3:.1f} ms</text>')
    return _drawing(kinds, drawn, y + 12)


def _chart(samples: Samples) -> str:
    names = [name for name in _COLOURS if name in samples[0][1]]
    most = max(max(each[name] for name in names) for _, each in samples) or 1
    first, seconds = samples[0][0], max(samples[-1][0] - samples[0][0], 1e-9)
    lines = []
    for name in names:
        points = " ".join(
            f"{(at - first) / seconds * 1000:.0f},{200 - 180 * each[name] / most:.1f}" for at, each in samples
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>')
    lines.append(f'<text x="0" y="14">{format_bytes(most)}</text>')
    lines.append(f'<text x="1000" y="214" text-anchor="end">{seconds:.0f} s</text>')
    return _drawing(names, lines, 220)
