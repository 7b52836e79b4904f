#!/usr/bin/env python3
"""Gathers texts for `pliant bench quality --texts FOLDER` from files that a Debian 12 machine has anyway.

    quality_texts.py FOLDER

Writes seven texts of different kinds, each its source's first 48 KiB (about 12k to 20k tokens), and prints where each came
from. Nothing is downloaded and nothing is kept in the repository; a source that is missing is named and left out.
"""
import glob
import pathlib
import sys

SIZE = 48 * 1024

# name -> (pattern, bytes to skip at the start)
SOURCES = {
    "python-reference": ("/usr/lib/python3.*/pydoc_data/topics.py", 4096),      # a language's manual, English
    "python-doctest": ("/usr/lib/python3.*/doctest.py", 0),                    # code and long explanations
    "python-decimal": ("/usr/lib/python3.*/_pydecimal.py", 0),                 # code, numbers
    "cpp-vector": ("/usr/include/c++/*/bits/stl_vector.h", 0),                 # C++ and Doxygen
    "html-entities": ("/usr/lib/python3.*/html/entities.py", 0),               # a table
    "timezones": ("/usr/share/zoneinfo/tzdata.zi", 0),                         # terse data
    "perl-debugger": ("/usr/share/perl/5.*/perl5db.pl", 0),                    # another language, much prose
}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pattern, skip) in SOURCES.items():
        found = sorted(glob.glob(pattern))
        if not found:
            print(f"{name}: no {pattern} here", file=sys.stderr)
            continue
        text = pathlib.Path(found[0]).read_bytes()[skip : skip + SIZE]
        (folder / f"{name}.txt").write_bytes(text.decode("utf-8", "ignore").encode())
        print(f"{name}: {found[0]}, {len(text)} bytes")


if __name__ == "__main__":
    main()
