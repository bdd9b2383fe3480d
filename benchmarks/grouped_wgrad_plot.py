# SPDX-License-Identifier: Apache-2.0
"""Draw the report of grouped_wgrad.py: the share of the roofline that each contestant reaches.

python benchmarks/grouped_wgrad_plot.py report.json --out docs/grouped_wgrad.svg
"""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path

# Contestants in the order of their bars: name in the report, words, colour.
CONTESTANTS = [
    ("ours", "grouped_wgrad", "#2b6cb0"),
    ("te_split_path", "TE split path (cuBLAS, one GEMM a group)", "#c05621"),
    ("mslk", "mslk-cuda grouped_wgrad", "#b7791f"),
    ("torch_grouped_mm_add", "torch._grouped_mm + fp32 add", "#718096"),
    ("torch_grouped_mm", "torch._grouped_mm, bf16, adds nothing (no peer)", "#cbd5e0"),
]
TARGET = 0.85
LEFT, WIDTH, BAR, GAP, TOP = 190, 560, 9, 12, 92


def times(row: dict) -> dict:
    """Milliseconds by contestant."""
    return {"ours": row["ms"], **row["peers_ms"], **row["context_ms"]}


def draw(report: dict) -> str:
    """The picture, as SVG."""
    rows, environment = report["rows"], report["environment"]
    shown = [entry for entry in CONTESTANTS if any(entry[0] in times(row) for row in rows)]
    most = max(row["roofline_ms"] / times(row)[name] for row in rows for name, *_ in shown
               if name in times(row))  # fmt: skip
    scale = WIDTH / max(1.0, most)
    body, y = [], TOP
    for row in rows:
        middle = y + BAR * len(shown) / 2 + 4
        body.append(f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">{row["name"]}</text>')
        for name, _, colour in shown:
            if name in times(row):
                share = row["roofline_ms"] / times(row)[name]
                body.append(
                    f'<rect x="{LEFT}" y="{y}" width="{share * scale:.1f}" height="{BAR - 1}"'
                    f' fill="{colour}"/><text x="{LEFT + share * scale + 4:.1f}" y="{y + BAR - 1}"'
                    f' font-size="9" fill="#444">{share:.2f}</text>'
                )
            y += BAR
        y += GAP
    for share, words, dash in ((TARGET, f"{TARGET:g}", "4 3"), (1.0, "roofline", "")):
        x = LEFT + share * scale
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{y - GAP + 4}" stroke="#222"'
            f' stroke-dasharray="{dash}"/><text x="{x:.1f}" y="{TOP - 10}"'
            f' text-anchor="middle">{words}</text>'
        )
    x, line = 20, 44
    for _, words, colour in shown:
        length = 22 + 6.2 * len(words)
        if x + length > LEFT + WIDTH + 40:
            x, line = 20, line + 18
        body.append(
            f'<rect x="{x:g}" y="{line - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14:g}" y="{line}">{html.escape(words)}</text>'
        )
        x += length
    title = (
        f"Weight gradients accumulated into fp32, share of the roofline: {environment['gpu']},"
        f" CUDA {environment['cuda']}, torch {environment['torch']}, {report['date']}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 50} {y + 8}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f"<title>{html.escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="20" y="22" font-size="13">{html.escape(title)}</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(draw(json.loads(options.report.read_text())))


if __name__ == "__main__":
    main()
