// SPDX-License-Identifier: MIT
#include "tools/info/build_versions.h"

#include <hwloc.h>
#include <hwy/highway.h>

#include <dnnl.hpp>

namespace tools {
namespace {

std::string version_text(unsigned major, unsigned minor, unsigned patch) { return text("%u.%u.%u", major, minor, patch); }

}  // namespace

Json build_versions() {
  const uint32_t loaded = tandem_version();
  const unsigned hwloc = hwloc_get_api_version();
  const dnnl_version_t* dnnl = dnnl_version();
  Json versions;
  versions["tandem"] = version_text(loaded >> 16, loaded >> 8 & 0xff, loaded & 0xff);
  versions["header"] = version_text(TANDEM_VERSION_MAJOR, TANDEM_VERSION_MINOR, TANDEM_VERSION_PATCH);
  versions["abi_fingerprint"] =
      text("0x%016llx", static_cast<unsigned long long>(tandem_abi_fingerprint(TANDEM_VERSION_MINOR)));
#if defined(__clang__)
  versions["compiler"] = "clang " __clang_version__;
#else
  versions["compiler"] = "gcc " __VERSION__;
#endif
  versions["highway"] = version_text(HWY_MAJOR, HWY_MINOR, HWY_PATCH);
  versions["onednn"] = version_text(static_cast<unsigned>(dnnl->major), static_cast<unsigned>(dnnl->minor),
                                    static_cast<unsigned>(dnnl->patch));
  versions["hwloc_api"] = version_text(hwloc >> 16, hwloc >> 8 & 0xff, hwloc & 0xff);
  return versions;
}

}  // namespace tools
