#!/usr/bin/env python3
"""Does a growth signal point the way the need goes?  Reckoner's chains of thought say what they read back, so the need is known.

A token is needed at a time when it was written before and a later line of the chain reads it. For each signal that a growing capacity
asked for, the need of the tokens so far is compared with the need HORIZON tokens later: the direction is right when the signal is above
the threshold and the need rises, or neither. Printed as the share of right ones beside what the better constant answer gets, as balanced
accuracy (the mean of the shares of rises and of others that are told; 50 % for any constant answer), and as the area under the ROC curve
(0.5 is chance). Only right answers count, as only their text is known to be sound.

    pliant bench quality MODEL --reckoner tests/data/problems/reckoner.jsonl --limit 16 --states 16/16 --no-returns --capacity 1000 \\
        --grow --grow-signal divergence --courses --json out.json         (nothing is dropped: the signal alone is judged)
    python3 bench/demand.py out.json
"""
import argparse
import json
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEFORE = len("_user\n")  # tokens of a prompt before the problem's text: a special one, then bytes
LINE = re.compile(r"(?:([a-z]\d<(?:[a-z]\d|\?))=|((?:[a-z]\d|\?))=)(\S+)(.*)")


def last_reads(problem, chain, prompt_tokens):
    """For each token of prompt and chain the position where it is read for the last time, or -1. A recall reads the nearest earlier
    occurrence of what it writes: a definition, who asked for a variable, or a variable's value."""
    after = prompt_tokens - BEFORE - len(problem)
    text = "\n" * (BEFORE - 1) + ";" + problem + "\n" * after + chain  # one character a token
    last = [-1] * len(text)

    def read(at, what, lead=""):
        source = text.rfind(lead + what, 0, at)
        if source < 0:
            return
        for i in range(source + len(lead), source + len(lead) + len(what)):
            last[i] = max(last[i], at)

    at = prompt_tokens
    for line in chain.split("\n"):
        match = LINE.match(line)
        if match:
            asked, name = match.group(1), match.group(2)
            if asked:
                read(at, asked)
                name = asked[3:]
                at_name = at + 3
            else:
                at_name = at
            read(at_name, name + "=" + match.group(3))
            for value in re.finditer(r" ([a-z]\d):(\d\d)", line):
                if value.group(1) != name:
                    read(at + value.start(1), value.group(0)[1:])
        at += len(line) + 1
    return last


def auc(rows):
    ranked = sorted(range(len(rows)), key=lambda i: rows[i][0])
    rank = {index: place for place, index in enumerate(ranked)}
    up = [rank[i] for i, row in enumerate(rows) if row[1]]
    down = len(rows) - len(up)
    return (sum(up) - len(up) * (len(up) - 1) / 2) / (len(up) * down) if up and down else float("nan")


def right(rows, above):
    return sum((value > above) == rise for value, rise in rows) / len(rows)


def balanced(rows, above):
    parts = [[row for row in rows if row[1] == rise] for rise in (False, True)]
    return sum(right(part, above) for part in parts) / 2 if all(parts) else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="what pliant bench quality --courses --json wrote")
    parser.add_argument("--problems", default=os.path.join(ROOT, "tests/data/problems/reckoner.jsonl"))
    parser.add_argument("--horizons", default="16,32,64,128,256")
    parser.add_argument("--above", default="0.02,0.025,0.03")
    args = parser.parse_args()
    with open(args.problems, encoding="utf-8") as file:
        problems = {one["id"]: one["prompt"] for one in map(json.loads, file)}
    with open(args.json, encoding="utf-8") as file:
        scores = json.load(file)["reckoner"]
    for score in scores:
        courses = [one for one in score.get("courses", []) if one["right"]]
        for horizon in map(int, args.horizons.split(",")):
            rows = []
            for one in courses:
                chain = one["answer"].split("</think>")[0]
                last = last_reads(problems[one["id"]], chain, one["prompt_tokens"])
                needed = lambda t: sum(read >= t for read in last[:t])
                for tokens, value, _ in one["signals"]:
                    if one["prompt_tokens"] + 32 <= tokens and tokens + horizon <= len(last):
                        rows.append((value, needed(tokens + horizon) > needed(tokens)))
            if not rows:
                continue
            rises = sum(row[1] for row in rows) / len(rows)
            shares = "  ".join(f"above {above}: {100 * right(rows, float(above)):.1f} % (balanced {100 * balanced(rows, float(above)):.1f} %)"
                               for above in args.above.split(","))
            print(f"{score['state']} {score['level']:7} over {horizon:3d} tokens: {len(rows)} signals, constant "
                  f"{100 * max(rises, 1 - rises):.1f} %  right {shares}  area {auc(rows):.2f}", flush=True)


if __name__ == "__main__":
    main()
