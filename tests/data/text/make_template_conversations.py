"""Writes template_conversations.json: the conversations that the conformance test renders with every real chat template.

Usage: python make_template_conversations.py
Then run make_template_golden.py.
"""

import json
import pathlib

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

SYSTEM = {"role": "system", "content": "You are a careful assistant.\nAnswer briefly."}
USER = {"role": "user", "content": "What is the weather in Paris, and how much is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is mild, and 2 + 2 is 4."}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.\nIn °C, \"feels like\" included.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, e.g. Zürich"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "detail": {
                    "type": "object",
                    "description": "What to report",
                    "properties": {
                        "wind": {"type": "boolean"},
                        "layers": {"type": "array", "items": {"type": "number"}},
                    },
                    "required": ["wind"],
                },
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "First"},
                "b": {"type": ["number", "null"], "description": "Second", "nullable": True},
            },
            "required": ["a", "b"],
        },
        "return": {"type": "number", "description": "The sum"},
    },
}
TOOLS = [WEATHER, CLOCK, ADD]


def call(call_id, name, arguments, as_text=False):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments},
    }


def result(call_id, name, content):
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


WEATHER_ARGUMENTS = {"city": "Paris", "days": 2, "detail": {"wind": True, "layers": [1.5, -2e-7, 1e22]}, "unit": None}


def tool_dialogue(as_text):
    return [
        SYSTEM,
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                call("call00001", "get_weather", WEATHER_ARGUMENTS, as_text),
                call("call00002", "add", {"a": 2, "b": 2}, as_text),
            ],
        },
        result("call00001", "get_weather", '{"temperature": 17.5, "sky": "clear"}'),
        result("call00002", "add", "4"),
        ANSWER,
        {"role": "user", "content": "And the time?"},
    ]


CONVERSATIONS = {
    "user": {"messages": [USER], "add_generation_prompt": True},
    "user_no_prompt": {"messages": [USER], "add_generation_prompt": False, "tools": None},
    "system_user": {"messages": [SYSTEM, USER], "add_generation_prompt": True, "tools": None},
    "several_turns": {
        "messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "  And 3 * 3?  "},
                     {"role": "assistant", "content": "\n9\n"}, {"role": "user", "content": "Thank you."}],
        "add_generation_prompt": True,
    },
    "ends_with_answer": {"messages": [USER, ANSWER, {"role": "user", "content": "Why?"},
                                      {"role": "assistant", "content": "<think>\nBecause.\n</think>\n\nMath."}],
                         "add_generation_prompt": False},
    "tools_offered": {"messages": [SYSTEM, USER], "tools": TOOLS, "add_generation_prompt": True},
    "tools_offered_no_system": {"messages": [USER], "tools": TOOLS, "add_generation_prompt": True},
    "tool_calls": {"messages": tool_dialogue(False), "tools": TOOLS, "add_generation_prompt": True},
    "tool_calls_text": {"messages": tool_dialogue(True), "tools": TOOLS, "add_generation_prompt": True},
    "tool_result_last": {"messages": tool_dialogue(False)[1:4], "tools": [WEATHER], "add_generation_prompt": True},
    "one_tool_call": {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call("abcdefghi", "get_time", {})]},
                     result("abcdefghi", "get_time", "12:00"), ANSWER],
        "tools": [CLOCK],
        "add_generation_prompt": False,
    },
    "empty_content": {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""},
                                   {"role": "assistant", "content": ""}, {"role": "user", "content": "?"}],
                      "add_generation_prompt": True},
    "null_content": {"messages": [USER, {"role": "assistant", "content": None}, {"role": "user", "content": "?"}],
                     "add_generation_prompt": True},
    "no_content": {"messages": [USER, {"role": "assistant"}, {"role": "user", "content": "?"}],
                   "add_generation_prompt": True},
    "unicode": {
        "messages": [{"role": "system", "content": "Répondez en français — s'il vous plaît\u00a0! \u3000"},
                     {"role": "user", "content": "Größe 日本語 \U0001f600 e\u0301 İstanbul ΣΑΣ <b>&amp;</b> \u2028line \"q\" \\ \t."},
                     {"role": "assistant", "content": "Да\u0301, хорошо."},
                     {"role": "user", "content": "\u200bنعم\u200f"}],
        "tools": [{"type": "function", "function": {
            "name": "suche", "description": "Sucht Übersetzungen für „日本“ \U0001f50d",
            "parameters": {"type": "object", "properties": {"größe": {"type": "string", "description": "naïve"}}}}}],
        "add_generation_prompt": True,
    },
    "parts": {
        "messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                     {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " this?"}]},
                     {"role": "assistant", "content": [{"type": "text", "text": "A test."}]},
                     {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}],
        "add_generation_prompt": True,
    },
    "reasoning": {
        "messages": [USER, {"role": "assistant", "content": "4.", "reasoning_content": "Two and two.\nSo four.",
                            "thinking": "Two and two.\nSo four."},
                     {"role": "user", "content": "Sure?"}],
        "add_generation_prompt": True,
        "enable_thinking": True,
        "thinking": True,
    },
    "no_thinking": {"messages": [SYSTEM, USER], "add_generation_prompt": True, "enable_thinking": False,
                    "thinking": False, "reasoning_effort": "low"},
    "developer": {"messages": [{"role": "developer", "content": "Use tools."}, USER], "tools": [ADD],
                  "add_generation_prompt": True},
    "documents": {"messages": [USER], "add_generation_prompt": True, "tools": None,
                  "documents": [{"title": "Paris", "text": "Paris is mild.", "doc_id": 1}]},
    "user_user": {"messages": [USER, {"role": "user", "content": "Hello?"}], "add_generation_prompt": True},
    "system_only": {"messages": [SYSTEM], "add_generation_prompt": True},
    "assistant_first": {"messages": [ANSWER, USER], "add_generation_prompt": True},
    "no_messages": {"messages": [], "add_generation_prompt": True},
}


def main():
    out = {name: {**SPECIALS, **context} for name, context in CONVERSATIONS.items()}
    path = pathlib.Path(__file__).parent / "template_conversations.json"
    path.write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


main()
