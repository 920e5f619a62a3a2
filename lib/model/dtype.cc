// SPDX-License-Identifier: MIT
#include "lib/model/dtype.h"

#include <string>

namespace tandem {

const char* key_type_names() {
  static const std::string& names = *new std::string([] {  // never destroyed, as calls may run while the process ends
    std::string list;
    for (const DtypeInfo& info : kDtypes)
      if (is_key_type(info.dtype)) list += (list.empty() ? "" : ", ") + std::string(info.name);
    return list;
  }());
  return names.c_str();
}

}  // namespace tandem
