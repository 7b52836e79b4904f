#!/usr/bin/env python3
"""Right answers over memory: reckoner problems under capacities of every kind, as a table and a plot (SVG).

Runs `pliant bench quality --reckoner` once a setting. Memory is the mean over decode steps of the device pages held, plane 0 of dropped
keys included, as a share of the request's own whole cache at 16 bits.

    python3 bench/capacity.py --limit 8                                  (a first look: some minutes on two cores)
    python3 bench/capacity.py --svg docs/capacity.svg --json out.json    (all 100 problems a level: 3 minutes on an H200, hours on two cores)
"""
import argparse
import json
import os
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests/data")
GONE = ["--no-returns", "--keep-last", "2", "--redundancy", "16", "--squared"]
DIVERGENCE = ["--capacity", "8", "--from-prompt", "--grow", "--grow-signal", "divergence", "--grow-above"]
FAMILIES = {
    "whole cache": [("16/16", [])],
    "recent tokens": [("16/16", [*GONE[:1], "--capacity", str(n), "--keep-last", str(n - 2)]) for n in (24, 48)],
    "fixed budget": [("16/16", [*GONE, "--capacity", str(n)]) for n in (16, 19, 21, 23, 26, 28, 30, 33, 36, 38, 42, 48)],
    "grows by divergence": [("16/16", [*GONE, *DIVERGENCE, at]) for at in ("0.05", "0.045", "0.04", "0.035", "0.03", "0.025", "0.02")],
    "returns": [(state, ["--capacity", str(n), "--grow"])
                for state, n in (("4/4", 6), ("8/4", 4), ("8/4", 5), ("8/4", 6), ("8/8", 6), ("16/16", 6))],
}
COLORS = {"whole cache": "#555555", "recent tokens": "#b0703a", "fixed budget": "#3a6fb0", "grows by divergence": "#8a4fb0",
          "returns": "#2e9157"}


def measure(args, state, flags):
    with tempfile.TemporaryDirectory(prefix="pliant-capacity-") as folder:
        out = os.path.join(folder, "out.json")
        subprocess.run([args.pliant, "bench", "quality", args.model, "--reckoner", args.problems, "--states", state,
                        "--limit", str(args.limit), "--slots", str(args.slots), "--json", out, *flags], check=True, stdout=subprocess.DEVNULL)
        with open(out, encoding="utf-8") as file:
            return json.load(file)["reckoner"]


def plot(rows, levels, path):
    width, height, left, top = 300, 240, 46, 30
    parts = []
    for index, level in enumerate(levels):
        x0 = left + index * (width + 50)
        parts.append(f'<text x="{x0 + width / 2}" y="18" text-anchor="middle">{level}</text>'
                     f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
        for share in (0, 25, 50, 75, 100):
            x, y = x0 + width * share / 105, top + height * (1 - share / 105)
            parts.append(f'<text x="{x}" y="{top + height + 16}" text-anchor="middle">{share}</text>'
                         f'<line x1="{x0}" y1="{y}" x2="{x0 + width}" y2="{y}" stroke="#eee"/>'
                         f'<text x="{x0 - 5}" y="{y + 4}" text-anchor="end">{share}</text>')
        for row in rows:
            if row["level"] != level:
                continue
            x, y = x0 + width * row["mean"] / 1.05, top + height * (1 - row["right"] / 1.05)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLORS[row["family"]]}" fill-opacity="0.8">'
                         f'<title>{row["family"]}: {row["flags"]}</title></circle>')
    for index, (family, color) in enumerate(COLORS.items()):
        x = left + index * 200
        parts.append(f'<circle cx="{x}" cy="{top + height + 52}" r="5" fill="{color}"/>'
                     f'<text x="{x + 10}" y="{top + height + 56}">{family}</text>')
    total = left + len(levels) * (width + 50)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{top + height + 70}" '
                   f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
                   f'{"".join(parts)}<text x="{left}" y="{top + height + 34}">mean bytes held, % of the whole cache '
                   f'(across); right answers, % (up)</text></svg>\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pliant", default=os.path.join(ROOT, "build/release/pliant"))
    parser.add_argument("--model", default=os.path.join(DATA, "models/reckoner-q8_0.gguf"))
    parser.add_argument("--problems", default=os.path.join(DATA, "problems/reckoner.jsonl"))
    parser.add_argument("--limit", type=int, default=0, help="problems a level; 0: all")
    parser.add_argument("--slots", type=int, default=128, help="problems at once")
    parser.add_argument("--families", default=",".join(FAMILIES), help="which of: " + ", ".join(FAMILIES))
    parser.add_argument("--svg", default="")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows, levels = [], []
    for family in args.families.split(","):
        for state, flags in FAMILIES[family]:
            for score in measure(args, state, flags):
                levels += [score["level"]] if score["level"] not in levels else []
                row = {"family": family, "level": score["level"], "flags": " ".join(["--states", state, *flags]),
                       "right": score["right"] / score["problems"], "problems": score["problems"],
                       "mean": score["held_pages"] / score["whole_pages"], "peak": score["peak_pages"] / score["whole_peak_pages"],
                       "returned": score["returned_tokens"] / score["units"] / max(1, score["tokens"])}
                rows.append(row)
                print(f"{family:20} {score['level']:7} right {score['right']:3d} of {score['problems']:3d}  "
                      f"mean {100 * row['mean']:5.1f} %  peak {100 * row['peak']:5.1f} %  "
                      f"returned {row['returned']:.2f} a token  {row['flags']}", flush=True)
    if args.svg:
        plot(rows, levels, args.svg)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
