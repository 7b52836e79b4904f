// Room: server. Chat messages and tools: checked, and brought to the form that chat templates
// expect. Any thread.
#pragma once

#include "server/field_reader.h"
#include "server/openai_request.h"

namespace pliant {

/// Reads messages, tools, tool_choice, add_generation_prompt and chat_template_kwargs of the
/// reader's object. Faults go to the reader.
/// - developer becomes system; a list of text parts becomes one string, its parts on lines of their
/// own;
/// - an assistant's absent content is "" unless it made tool calls, then null;
/// - tool-call arguments that are the text of a JSON object become that object, which is what
/// templates print.
void ReadChatInput(FieldReader* fields, const Json& body, ChatInput* out);

}  // namespace pliant
