// SPDX-License-Identifier: MIT
// Bytes are tokens: text goes to the model unchanged. A model with another vocabulary needs its tokenizer, which this
// runtime does not have.
#ifndef EXAMPLES_GENERATE_BYTE_TOKENIZER_H_
#define EXAMPLES_GENERATE_BYTE_TOKENIZER_H_

#include <string>

#include "failure.h"
#include "llama_config.h"

namespace generate {

inline Failure check_vocabulary(const ModelConfig& config, const std::string& directory) {
  if (config.vocab_size == 256) return {};
  return {directory + "/config.json: vocab_size = " + std::to_string(config.vocab_size) +
          " needs a tokenizer; this runtime has bytes alone (vocab_size 256)"};
}

}  // namespace generate

#endif  // EXAMPLES_GENERATE_BYTE_TOKENIZER_H_
