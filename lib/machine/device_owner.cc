// SPDX-License-Identifier: MIT
#include "lib/machine/device_owner.h"

#include <algorithm>

#include "lib/base/json_string.h"
#include "lib/base/process_end.h"
#include "lib/machine/device_status.h"

namespace tandem {
namespace {

std::string device_name(size_t device_idx, const DeviceInfo& info) {
  return "device " + std::to_string(device_idx) + " (" + text_of(info.name) + ")";
}

Status unusable(const DeviceModule& module, int64_t underlying, const std::string& reason) {
  return fail_with(TANDEM_ERROR_BACKEND, underlying, "backend",
                   std::string("backend = \"") + module.table->name + "\" from " + module.path + ": " + reason);
}

}  // namespace

Status DeviceOwner::open(const char* backend, const char* path, std::unique_ptr<DeviceOwner>* owner) {
  auto made = std::make_unique<DeviceOwner>();
  TANDEM_TRY(open_device_module(backend, path, &made->module_));
  TANDEM_TRY(made->list_devices());
  TANDEM_TRY(made->open_first());
  *owner = std::move(made);
  return {};
}

Status DeviceOwner::list_devices() {
  DeviceError error;
  const int32_t n = module_.table->n_devices(&error);
  if (n < 0) return unusable(module_, error.underlying, "devices cannot be listed: " + reason_of(error));
  if (n == 0) return unusable(module_, error.underlying, "there is no device");
  infos_.resize(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) module_.table->describe(i, &infos_[static_cast<size_t>(i)]);
  return {};
}

Status DeviceOwner::open_first() {
  std::string reasons;
  const auto is_usable = [](const DeviceInfo& info) { return info.refusal[0] == '\0'; };
  const auto usable = std::find_if(infos_.begin(), infos_.end(), is_usable);
  if (usable == infos_.end()) {
    for (size_t i = 0; i < infos_.size(); ++i)
      reasons.append(i > 0 ? "; " : "").append(device_name(i, infos_[i])).append(": ").append(text_of(infos_[i].refusal));
    return unusable(module_, 0, "no device can be used: " + reasons);
  }
  device_idx_ = static_cast<size_t>(usable - infos_.begin());
  device_.info = *usable;
  device_.idx = static_cast<int32_t>(device_idx_);
  DeviceError error;
  if (module_.table->open(static_cast<int32_t>(device_idx_), &device_.self, &error) != TANDEM_OK)
    return unusable(module_, error.underlying,
                    device_name(device_idx_, *usable) + " could not be opened: " + reason_of(error));
  device_.table = module_.table;
  device_.bus = &bus_;
  watch_exit();
  return {};
}

DeviceOwner::~DeviceOwner() {
  if (device_.table != nullptr && !process_ends()) device_.table->close(device_.self);
}

std::string DeviceOwner::devices_json() const {
  std::string json = "[";
  for (size_t i = 0; i < infos_.size(); ++i) {
    const DeviceInfo& info = infos_[i];
    const std::string refusal = text_of(info.refusal);
    const char* state = i == device_idx_ ? "open" : refusal.empty() ? "not asked for" : "refused";
    json += std::string(i > 0 ? "," : "") + "{\"backend\":" + json_string(backend());
    json += ",\"device\":" + std::to_string(i) + ",\"name\":" + json_string(text_of(info.name));
    json += ",\"memory_bytes\":" + std::to_string(info.memory_bytes);
    json += ",\"n_multiprocessors\":" + std::to_string(info.n_multiprocessors);
    json += ",\"compute_capability\":" + std::to_string(info.compute_capability);
    json += std::string(",\"state\":\"") + state + "\"";
    if (!refusal.empty()) json += ",\"refusal\":" + json_string(refusal);
    json += '}';
  }
  return json + "]";
}

std::string DeviceOwner::module_json() const {
  std::string json = "{\"name\":" + json_string(backend()) + ",\"state\":\"ready\"";
  json += ",\"path\":" + json_string(module_.path) + ",\"refused\":[";
  for (size_t i = 0; i < module_.refused.size(); ++i) json.append(i > 0 ? "," : "").append(json_string(module_.refused[i]));
  return json + "]}";
}

}  // namespace tandem
