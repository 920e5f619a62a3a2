// SPDX-License-Identifier: MIT
#include "lib/base/json_string.h"

#include <cstdio>

namespace tandem {
namespace {

// Returns the bytes of the UTF-8 sequence that begins the text, or 0 if there is none. Only shortest forms of U+0000 to
// U+10FFFF without surrogates count.
size_t sequence_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < n) return 0;
  const unsigned least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < least || byte(1) > most) return 0;
  for (size_t i = 2; i < n; ++i)
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  return n;
}

}  // namespace

std::string json_string(std::string_view text) {
  std::string json = "\"";
  while (!text.empty()) {
    const size_t n = sequence_bytes(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (n == 0) {
      json += "\\ufffd";
    } else if (first < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", first);
      json += escape;
    } else {
      if (first == '"' || first == '\\') json += '\\';
      json += text.substr(0, n);
    }
    text.remove_prefix(n == 0 ? 1 : n);
  }
  return json + '"';
}

}  // namespace tandem
