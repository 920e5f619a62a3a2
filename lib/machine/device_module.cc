// SPDX-License-Identifier: MIT
#include "lib/machine/device_module.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <sys/auxv.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "lib/base/module_file.h"

namespace tandem {
namespace {

constexpr size_t kMaxNameBytes = 32;
constexpr char kPathVariable[] = "TANDEM_BACKEND_PATH";

// The name becomes part of a path, so it must not lead elsewhere.
Status check_name(const char* name) {
  const size_t n = std::strlen(name);
  if (n <= kMaxNameBytes && std::strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") == n) return {};
  return fail(TANDEM_ERROR_INVALID_ARGUMENT, "backend",
              "backend = \"%s\" is not a name of at most %zu letters a to z, digits, _ and -", name, kMaxNameBytes);
}

// Returns the dynamic linker's error, without a leading path, as the caller adds the path.
std::string linker_error(const std::string& path) {
  const char* text = dlerror();
  const std::string error = text != nullptr ? text : "the dynamic linker gives no reason";
  const std::string prefix = path + ": ";
  return error.compare(0, prefix.size(), prefix) == 0 ? error.substr(prefix.size()) : error;
}

// Opens a module and finds its table. Returns "", or why there is no usable table.
std::string open_file(const std::string& path, const char* name, const DeviceTable** table) {
  // dlopen() opens the path again, so a change of the file in between goes unnoticed. The check is for files that were
  // damaged before. A user who may write to the module's file can run any code here anyway.
  const std::string refusal = module_file_refusal(path);
  if (!refusal.empty()) return refusal;
  if (path.find('$') != std::string::npos) return "has a $, which the dynamic linker may replace by something else";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return linker_error(path);
  void* symbol = dlsym(handle, kDeviceEntry);
  if (symbol == nullptr) return std::string("has no ") + kDeviceEntry + "()";
  *table = reinterpret_cast<DeviceEntryFn>(symbol)(kDeviceAbi);
  return table_refusal(*table, name);
}

// Finds the folder of the file that this code was loaded from. Returns "", or why the folder is unknown.
std::string own_folder(std::string* folder) {
  Dl_info info;
  link_map* loaded = nullptr;
  const auto* code = reinterpret_cast<const void*>(&open_device_module);
  if (dladdr1(code, &info, reinterpret_cast<void**>(&loaded), RTLD_DL_LINKMAP) == 0)
    return "not known to the dynamic linker";
  // The linker has no name for the program itself. Another name may be relative to an earlier working directory. If a
  // program runs with more rights than its caller, the caller may have linked it into a folder of his own.
  if (*loaded->l_name == '\0' && getauxval(AT_SECURE) != 0)
    return "ignored in a process that is setuid or setgid or has capabilities";
  const std::string name = *loaded->l_name == '\0' ? "/proc/self/exe" : loaded->l_name;
  if (name[0] != '/') return "was opened as " + name + ", which is not an absolute path";
  const std::unique_ptr<char, void (*)(void*)> real(realpath(name.c_str(), nullptr), free);
  if (real == nullptr) return name + ": " + std::generic_category().message(errno);
  *folder = real.get();
  folder->resize(folder->rfind('/'));
  return "";
}

class Search {
 public:
  Search(const char* name, DeviceModule* module) : name_(name), module_(module) {}

  // These functions return true if the module has been found.
  bool try_file(const std::string& path) {
    const std::string reason = open_file(path, name_, &module_->table);
    if (!reason.empty()) return refuse(path, reason);
    module_->path = path;
    return true;
  }

  bool try_folder(const std::string& folder) { return try_file(folder + "/libtandem-" + name_ + ".so"); }

  bool try_variable() {
    const char* folders = secure_getenv(kPathVariable);
    if (folders == nullptr)
      return getenv(kPathVariable) != nullptr &&
             refuse(kPathVariable, "ignored in a process that is setuid or setgid or has capabilities");
    if (*folders == '\0') return false;
    for (const char* end = folders; end != nullptr; folders = end + 1) {
      end = std::strchr(folders, ':');
      const std::string folder = end != nullptr ? std::string(folders, end) : folders;
      if (folder[0] != '/')
        refuse("\"" + folder + "\" in " + kPathVariable, "not an absolute path");
      else if (try_folder(folder))
        return true;
      if (end == nullptr) break;
    }
    return false;
  }

  bool try_own_folder() {
    std::string folder;
    const std::string reason = own_folder(&folder);
    if (!reason.empty()) return refuse("beside the library", reason);
    return try_folder(folder) || try_folder(folder + "/tandem");  // a build tree; an installation, perhaps moved
  }

 private:
  bool refuse(const std::string& place, const std::string& reason) {
    module_->refused.push_back(place + ": " + reason);
    return false;
  }

  const char* name_;
  DeviceModule* module_;
};

Status no_module(const char* name, const char* path, const DeviceModule& module) {
  std::string message = std::string("backend = \"") + name + "\"" + (path != nullptr ? " with backend_path" : "") +
                        ": no module can be used: ";
  for (size_t i = 0; i < module.refused.size(); ++i) message += (i > 0 ? "; " : "") + module.refused[i];
  return fail_with(TANDEM_ERROR_BACKEND, 0, path != nullptr ? "backend_path" : "backend", std::move(message));
}

}  // namespace

std::string table_refusal(const DeviceTable* table, const char* name) {
  const std::string wanted = std::to_string(kDeviceAbi);
  if (table == nullptr) return "has no table for ABI " + wanted;
  if (table->abi != kDeviceAbi) return "its table is of ABI " + std::to_string(table->abi) + ", not " + wanted;
  if (table->struct_size < sizeof(DeviceTable))
    return "its table has " + std::to_string(table->struct_size) + " bytes, not " + std::to_string(sizeof(DeviceTable));
  if (table->name == nullptr || std::strcmp(table->name, name) != 0)
    return std::string("its table is of ") + (table->name == nullptr ? "no name" : table->name);
  const struct {
    const char* name;
    bool there;
  } functions[] = {
      {"n_devices", table->n_devices != nullptr},
      {"describe", table->describe != nullptr},
      {"open", table->open != nullptr},
      {"close", table->close != nullptr},
      {"allocate", table->allocate != nullptr},
      {"release", table->release != nullptr},
      {"copy", table->copy != nullptr},
      {"fill", table->fill != nullptr},
      {"wait", table->wait != nullptr},
      {"allocate_shared", table->allocate_shared != nullptr},
      {"release_shared", table->release_shared != nullptr},
      {"check", table->check != nullptr},
      {"capturing", table->capturing != nullptr},
      {"supports", table->supports != nullptr},
      {"workspace_bytes", table->workspace_bytes != nullptr},
      {"most_list_rows", table->most_list_rows != nullptr},
      {"append", table->append != nullptr},
      {"attend", table->attend != nullptr},
      {"merge", table->merge != nullptr},
      {"observe", table->observe != nullptr},
      {"supports_rebuild", table->supports_rebuild != nullptr},
      {"rebuild_bytes", table->rebuild_bytes != nullptr},
      {"rebuild", table->rebuild != nullptr},
      {"name_keys", table->name_keys != nullptr},
      {"bound_chunks", table->bound_chunks != nullptr},
      {"search_bytes", table->search_bytes != nullptr},
      {"search", table->search != nullptr},
      {"pattern_bytes", table->pattern_bytes != nullptr},
      {"index_patterns", table->index_patterns != nullptr},
      {"list_patterns", table->list_patterns != nullptr},
      {"accumulate", table->accumulate != nullptr},
      {"create_stream", table->create_stream != nullptr},
      {"destroy_stream", table->destroy_stream != nullptr},
      {"create_event", table->create_event != nullptr},
      {"destroy_event", table->destroy_event != nullptr},
      {"record_event", table->record_event != nullptr},
      {"wait_event", table->wait_event != nullptr},
      {"copy_strided", table->copy_strided != nullptr},
      {"copy_batch", table->copy_batch != nullptr},
      {"pin", table->pin != nullptr},
      {"unpin", table->unpin != nullptr},
  };
  for (const auto& function : functions)
    if (!function.there) return std::string("its table has no ") + function.name + "()";
  return "";
}

Status open_device_module(const char* name, const char* path, DeviceModule* module) {
  TANDEM_TRY(check_name(name));
  if (path != nullptr && *path != '/')
    return fail(TANDEM_ERROR_INVALID_ARGUMENT, "backend_path", "backend_path = \"%s\" is not an absolute path", path);
  DeviceModule found;
  Search search(name, &found);
  const bool is_found = path != nullptr
                            ? search.try_file(path)
                            : search.try_variable() || search.try_own_folder() || search.try_folder(TANDEM_MODULE_FOLDER);
  if (!is_found) return no_module(name, path, found);
  *module = std::move(found);
  return {};
}

}  // namespace tandem
