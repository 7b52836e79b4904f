"""Writes template_golden.json: what the reference engine makes of every real chat template and conversation.

Usage: python make_template_golden.py FOLDER_OF_TEMPLATES
Needs transformers and jinja2 (its own compiled environment is the reference). Commits hashes only, not the texts:
  "ok HASH"              the output
  "TemplateError HASH"   raise_exception; the hash of its message
  "UndefinedError HASH"  the hash of its message
  "NAME"                 another exception, of this class
HASH is FNV-1a over the UTF-8 bytes, 64 bits, in hex.
"""

import datetime
import json
import pathlib
import sys

import jinja2
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 3, 9, 14, 5, 7)


class FixedTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FixedTime


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def outcome(source, context):
    try:
        return "ok " + fnv(chat_template_utils._compile_jinja_template(source).render(**context))
    except jinja2.exceptions.UndefinedError as error:
        return "UndefinedError " + fnv(str(error))
    except jinja2.exceptions.TemplateError as error:
        if type(error) is jinja2.exceptions.TemplateError:
            return "TemplateError " + fnv(str(error))
        return type(error).__name__
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def main():
    here = pathlib.Path(__file__).parent
    conversations = json.loads((here / "template_conversations.json").read_text(encoding="utf-8"))
    golden = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
        source = path.read_bytes().decode("utf-8")
        golden[path.name] = {"source": fnv(source)}
        for name, context in conversations.items():
            golden[path.name][name] = outcome(source, json.loads(json.dumps(context)))
    (here / "template_golden.json").write_text(json.dumps(golden, indent=0) + "\n")
    all_outcomes = [o for t in golden.values() for k, o in t.items() if k != "source"]
    print(len(golden), "templates,", len(all_outcomes), "renderings,",
          sum(o.startswith("ok") for o in all_outcomes), "without error")


main()
