// SPDX-License-Identifier: MIT
#include "data_file.h"

#include <filesystem>
#include <system_error>

namespace generate {

std::string data_file(const std::string& name) {
  std::error_code error;
  const std::filesystem::path own_folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  const std::filesystem::path installed = (own_folder / TANDEM_BIN_TO_DATA / name).lexically_normal();
  if (std::filesystem::exists(installed, error)) return installed;
  const std::filesystem::path built = (own_folder / "../share/tandem" / name).lexically_normal();
  return std::filesystem::exists(built, error) ? built : installed;
}

}  // namespace generate
