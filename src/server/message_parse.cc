#include "server/message_parse.h"

#include <algorithm>
#include <array>

namespace pliant {
namespace {

constexpr std::size_t kMaxNameBytes = 256;
constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "assistant",
                                                    "tool"};
// Variables of the template that belong to the server.
constexpr std::array<std::string_view, 5> kReserved = {"messages", "tools", "add_generation_prompt",
                                                       "bos_token", "eos_token"};

/// A list of parts as one string; false after reporting a fault.
bool JoinParts(FieldReader* fields, const Json& parts, const std::string& where, std::string* out) {
  if (parts.empty()) {
    fields->Fail(BadField(where, "'" + where + "' is an empty list; it needs at least one part"));
    return false;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Json& part = parts[i];
    const std::string at = where + "[" + std::to_string(i) + "]";
    if (!part.is_object()) {
      fields->Fail(BadField(at, "'" + at + "' must be an object, not " + Describe(part)));
      return false;
    }
    const auto type = part.find("type");
    if (type == part.end() || !type->is_string()) {
      fields->Fail(BadField(at + ".type", "'" + at + ".type' must be a string"));
      return false;
    }
    const auto& kind = type->get_ref<const std::string&>();
    if (kind != "text") {
      fields->Fail(BadField(
          at + ".type",
          "'" + at + ".type' is \"" + Excerpt(kind, 40) + "\"; this model takes text parts only",
          "unsupported_content"));
      return false;
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) {
      fields->Fail(BadField(at + ".text", "'" + at + ".text' must be a string"));
      return false;
    }
    if (i > 0) *out += '\n';
    *out += text->get_ref<const std::string&>();
  }
  return true;
}

/// Replaces text that is a JSON object by the object. Anything else stays.
void ParseArguments(Json* function) {
  const auto arguments = function->find("arguments");
  if (arguments == function->end() || !arguments->is_string()) return;
  Json parsed;
  JsonLimits limits;
  limits.max_depth = 50;
  if (!ParseJsonBody(arguments->get_ref<const std::string&>(), limits, &parsed)) {
    *arguments = std::move(parsed);
  }
}

bool ReadToolCalls(FieldReader* fields, const Json& calls, const std::string& where, Json* out) {
  if (!calls.is_array()) {
    fields->Fail(BadField(where, "'" + where + "' must be a list, not " + Describe(calls)));
    return false;
  }
  *out = calls;
  for (std::size_t i = 0; i < out->size(); ++i) {
    Json& call = (*out)[i];
    const std::string at = where + "[" + std::to_string(i) + "]";
    const auto function = call.is_object() ? call.find("function") : call.end();
    if (!call.is_object() || function == call.end() || !function->is_object()) {
      fields->Fail(BadField(at + ".function", "'" + at + ".function' must be an object"));
      return false;
    }
    const auto name = function->find("name");
    if (name == function->end() || !name->is_string()) {
      fields->Fail(BadField(at + ".function.name", "'" + at + ".function.name' must be a string"));
      return false;
    }
    ParseArguments(&*function);
  }
  return true;
}

bool ReadMessage(FieldReader* fields, const Json& message, const std::string& where, Json* out) {
  if (!message.is_object()) {
    fields->Fail(BadField(where, "'" + where + "' must be an object, not " + Describe(message)));
    return false;
  }
  FieldReader own(&message, where + ".");
  const std::optional<std::string> role = own.String("role", kMaxNameBytes);
  if (!own.failed() && !role) own.Fail("role", "is missing");
  if (!own.failed() && std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end()) {
    own.Fail("role", "must be system, developer, user, assistant or tool, not \"" +
                         Excerpt(*role, 40) + "\"");
  }
  if (own.failed()) {
    fields->Fail(*own.error());
    return false;
  }
  Json made;
  made["role"] = *role == "developer" ? "system" : *role;

  const Json* calls = *role == "assistant" ? own.Find("tool_calls") : nullptr;
  const bool has_calls = calls != nullptr && !(calls->is_array() && calls->empty());
  if (const Json* content = own.Find("content")) {
    std::string text;
    if (content->is_string()) {
      text = content->get_ref<const std::string&>();
    } else if (!content->is_array()) {
      own.Fail("content", "must be a string or a list of text parts, not " + Describe(*content));
    } else if (!JoinParts(&own, *content, where + ".content", &text)) {
      // The fault is in `own`.
    }
    made["content"] = std::move(text);
  } else if (*role == "assistant") {
    made["content"] = has_calls ? Json(nullptr) : Json("");
  } else {
    own.Fail("content", "is missing; a string or a list of text parts is expected");
  }
  // The rest (name, tool_call_id, reasoning_content, ...) goes to the template as it is.
  for (const auto& [key, value] : message.items()) {
    if (key != "role" && key != "content" && key != "tool_calls") made[key] = value;
  }
  own.String("name", kMaxNameBytes);
  own.String("tool_call_id", kMaxNameBytes);
  if (has_calls && !own.failed()) {
    Json read;
    if (ReadToolCalls(&own, *calls, where + ".tool_calls", &read))
      made["tool_calls"] = std::move(read);
  }
  if (own.failed()) {
    fields->Fail(*own.error());
    return false;
  }
  *out = std::move(made);
  return true;
}

void ReadTools(FieldReader* fields, ChatInput* out) {
  for (const char* old : {"functions", "function_call"}) {
    if (fields->Find(old)) fields->Fail(old, "is not supported; use 'tools'", "unsupported");
  }
  bool use_tools = true;
  if (const Json* choice = fields->Find("tool_choice")) {
    if (*choice == "none") {
      use_tools = false;
    } else if (*choice != "auto") {
      fields->Fail("tool_choice", "may be \"auto\" or \"none\"; a forced call is not supported",
                   "unsupported");
    }
  }
  const Json* tools = fields->Find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array()) {
    fields->Fail("tools", "must be a list, not " + Describe(*tools));
    return;
  }
  for (std::size_t i = 0; i < tools->size(); ++i) {
    const Json& tool = (*tools)[i];
    const std::string at = "tools[" + std::to_string(i) + "]";
    const auto function = tool.is_object() ? tool.find("function") : tool.end();
    if (!tool.is_object() || function == tool.end() || !function->is_object() ||
        !function->contains("name") || !(*function)["name"].is_string()) {
      fields->Fail(at, "must be {\"type\": \"function\", \"function\": {\"name\": ...}}");
      return;
    }
  }
  if (use_tools && !tools->empty()) out->tools = *tools;
}

}  // namespace

void ReadChatInput(FieldReader* fields, const Json& body, ChatInput* out) {
  if (fields->failed()) return;
  const auto messages = body.find("messages");
  if (messages == body.end() || !messages->is_array()) {
    fields->Fail("messages", messages == body.end()
                                 ? "is missing"
                                 : "must be a list of messages, not " + Describe(*messages));
    return;
  }
  if (messages->empty()) {
    fields->Fail("messages", "is empty; it needs at least one message");
    return;
  }
  for (std::size_t i = 0; i < messages->size(); ++i) {
    Json message;
    if (!ReadMessage(fields, (*messages)[i], "messages[" + std::to_string(i) + "]", &message))
      return;
    out->messages.push_back(std::move(message));
  }
  ReadTools(fields, out);
  out->add_generation_prompt =
      fields->Bool("add_generation_prompt").value_or(out->add_generation_prompt);
  if (const Json* kwargs = fields->Find("chat_template_kwargs")) {
    if (!kwargs->is_object()) {
      fields->Fail("chat_template_kwargs", "must be an object, not " + Describe(*kwargs));
      return;
    }
    for (std::string_view name : kReserved) {
      if (kwargs->contains(std::string(name))) {
        fields->Fail("chat_template_kwargs", "may not set \"" + std::string(name) + "\"");
      }
    }
    out->template_kwargs = *kwargs;
  }
}

}  // namespace pliant
