// SPDX-License-Identifier: MIT
#include "lib/dtype.h"

#include <string>

namespace tandem {

const char* storage_type_names() {
  static const std::string& names = *new std::string([] {  // never destroyed: calls may be made while the process ends
    std::string list;
    for (const DtypeInfo& info : kDtypes) list += (list.empty() ? "" : ", ") + std::string(info.name);
    return list;
  }());
  return names.c_str();
}

}  // namespace tandem
