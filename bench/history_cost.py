#!/usr/bin/env python3
"""What a history with a capacity costs: `pliant bench quality --reckoner` under perf, its time by what was done.

signal     the queries' means and what is made of them
scoring    what each token got, added up
likeness   keys before RoPE, their signs or 8-bit codes, and the nearest later one
choosing   who leaves for a block that is dropped or a page that returns
watching   attention's part: logits of dropped keys from plane 0, and whether a page returns
moving     rows to and from kept blocks, with their checksums

Prompts are part of it, and with them the rows that are scored one by one (as attention). Then what was counted of decode steps alone:
operations (a multiplication and an addition are two) as a share of those of products with weights and attention. Needs perf.

    python3 bench/history_cost.py                                 (some seconds)
    python3 bench/history_cost.py --after 10                      (decode steps)
    python3 bench/history_cost.py -- --states 16/16 --no-returns --keep-last 2 --redundancy 16 --capacity 38
"""
import argparse
import json
import os
import re
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests/data")
KINDS = [  # the first that matches
    ("signal", r"NoteQuer|QuerySignal"),
    ("scoring", r"AddScores|AddWeights|AddLogits"),
    ("likeness", r"FewestSigns|NoteRows|RetainedHistory::(?:Note|AddToMean|WeightAt)|MixChannels|N_\w+::Mix\b|JoinPlanes|::DecodeRow\(|"
                 r"(?:N_\w+|\(anonymous namespace\))::(?:Decode(?:Any)?(?:Rows)?|Signs|Fewest|JoinBytes)\b"),
    ("choosing", r"LeastUseful|BoundOf|PlacesBelow|Candidate|LeavingOrder|RetainedHistory::(?!Wanted)"),
    ("watching", r"WholeRows|AnyRows|SumRows|::Watch(?:Rows)?\b|CodeQueries|LoadScales|AskForKeys|PageMasses|BitsAbove|Wanted|log2f"),
    ("moving", r"CopyRows|ReturnRows|DropRows|OriginalBlock|StoreChecksum|::Find\b|Peek"),
    ("attention", r"KeyDots|ValueSums|Weigh|N_\w+::(Dots|Accumulate|Merge|Finish|LoadQueries|DecodeBlock)\b|Attend|DecodeRowPermuted|"
                  r"Exp2One|kv_amx|ScoreRows|RunItem"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pliant", default=os.path.join(ROOT, "build/release/pliant"))
    parser.add_argument("--model", default=os.path.join(DATA, "models/reckoner-q8_0.gguf"))
    parser.add_argument("--level", default="hard")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--top", type=int, default=0, help="name so many symbols of each kind")
    parser.add_argument("--after", type=int, default=0, help="leave out so many percent of the run, prompts: 10 leaves decode steps")
    parser.add_argument("flags", nargs="*", default=[], help="of pliant bench quality, behind --")
    args = parser.parse_args()
    flags = args.flags or ["--states", "8/4", "--capacity", "6", "--grow"]
    with tempfile.TemporaryDirectory(prefix="pliant-cost-") as folder:
        problems, record, measured = (os.path.join(folder, name) for name in ("problems.jsonl", "perf.data", "measured.json"))
        with open(os.path.join(DATA, "problems/reckoner.jsonl"), encoding="utf-8") as file, open(problems, "w", encoding="utf-8") as out:
            out.writelines([line for line in file if f'"level": "{args.level}"' in line][:args.count])
        subprocess.run(["perf", "record", "-q", "-F", "1999", "-o", record, args.pliant, "bench", "quality", args.model, "--reckoner", problems,
                        "--threads", "1", "--slots", str(args.count), "--json", measured, *flags], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report = subprocess.run(["perf", "report", "-i", record, "--no-children", "-F", "overhead,symbol", "--stdio",
                                 *(["--time", f"{args.after}%-100%"] if args.after else [])], check=True,
                                capture_output=True, text=True).stdout
        with open(measured, encoding="utf-8") as file:
            score = json.load(file)["reckoner"][0]
    found = {}
    for line in report.splitlines():
        match = re.match(r"\s*(\d+\.\d+)%\s+\[.\]\s+(.*)", line) or re.match(r"\s*(\d+\.\d+)%\s+\[k\]\s+(.*)", line)
        if match:
            name = match.group(2).strip()
            kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), "rest")
            found.setdefault(kind, []).append((float(match.group(1)), name))
    for kind in [kind for kind, _ in KINDS] + ["rest"]:
        parts = sorted(found.get(kind, []), reverse=True)
        print(f"{kind:10} {sum(share for share, _ in parts):6.2f} %", flush=True)
        for share, name in parts[:args.top]:
            print(f"    {share:5.2f} %  {name[:110]}")
    counted = score["operations"]
    print(f"counted of {score['tokens']} tokens, {counted['model'] / score['tokens'] / 1e6:.1f} M operations each: " +
          ", ".join(f"{kind} {100 * counted[kind] / counted['model']:.2f} %" for kind in ("scoring", "watching")))


if __name__ == "__main__":
    main()
