// SPDX-License-Identifier: MIT
// Copies to the device by a module, single ones and lists of them, byte for byte.
//
//   copies_test [MODULE]
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device/open_device.h"
#include "with_cmocka.h"

namespace {

using namespace tandem;

const test::OpenDevice* device = nullptr;

// Rows of a region of host memory that are copied to the device, where `gap_bytes` lie between them.
struct Rows {
  int64_t row_bytes, n_rows, gap_bytes;
};

// Regions of whole pages. Either each region is pinned separately, or none is.
class CopiesCase {
 public:
  CopiesCase(const std::vector<Rows>& wanted, bool is_pinned) : wanted_(wanted) {
    for (const Rows& rows : wanted_) {
      Region& region = regions_.emplace_back();
      region.bytes = (bytes_of(rows) + kPage - 1) / kPage * kPage;
      region.host = static_cast<std::byte*>(std::aligned_alloc(kPage, static_cast<size_t>(region.bytes)));
      assert_non_null(region.host);
      for (int64_t i = 0; i < region.bytes; ++i) region.host[i] = static_cast<std::byte>((i * 7 + i / 251 + n_bytes_) % 255);
      DeviceError error;
      if (is_pinned) device->must(device->table->pin(device->self, region.host, region.bytes, &error), error);
      region.is_pinned = is_pinned;
      region.at = n_bytes_;
      n_bytes_ += bytes_of(rows) + rows.gap_bytes + 64;
    }
    there_ = static_cast<std::byte*>(device->allocate(n_bytes_));
    device->wait();
  }
  ~CopiesCase() {
    for (const Region& region : regions_) {
      if (region.is_pinned) device->table->unpin(device->self, region.host);
      std::free(region.host);
    }
    device->release(there_);
  }
  CopiesCase(const CopiesCase&) = delete;

  void check(bool one_by_one) {
    std::vector<StridedCopy> copies;
    std::vector<std::byte> expected(static_cast<size_t>(n_bytes_), std::byte{0xff});
    for (size_t r = 0; r < regions_.size(); ++r) {
      const Rows& rows = wanted_[r];
      const int64_t stride = rows.row_bytes + rows.gap_bytes;
      copies.push_back({there_ + regions_[r].at, regions_[r].host, rows.row_bytes, rows.n_rows, stride, stride});
      for (int64_t i = 0; i < rows.n_rows; ++i)
        std::memcpy(expected.data() + regions_[r].at + i * stride, regions_[r].host + i * stride,
                    static_cast<size_t>(rows.row_bytes));
    }
    DeviceError error;
    void* stream = nullptr;
    device->must(device->table->create_stream(device->self, &stream, &error), error);
    if (one_by_one) {
      for (const StridedCopy& copy : copies)
        device->must(device->table->copy_strided(device->self, &copy, stream, &error), error);
    } else {
      device->must(
          device->table->copy_batch(device->self, copies.data(), static_cast<int64_t>(copies.size()), stream, &error),
          error);
    }
    device->must(device->table->wait(device->self, stream, &error), error);
    device->table->destroy_stream(device->self, stream);
    std::vector<std::byte> got(expected.size());
    device->download(got.data(), there_, n_bytes_);
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != expected[i]) fail_msg("byte %zu of %zu is another", i, got.size());
  }

 private:
  static constexpr int64_t kPage = 4096;
  struct Region {
    std::byte* host = nullptr;
    int64_t bytes = 0, at = 0;
    bool is_pinned = false;
  };
  static int64_t bytes_of(const Rows& rows) {
    return (rows.n_rows - 1) * (rows.row_bytes + rows.gap_bytes) + rows.row_bytes;
  }

  std::vector<Rows> wanted_;
  std::vector<Region> regions_;
  std::byte* there_ = nullptr;
  int64_t n_bytes_ = 0;
};

void check(const std::vector<Rows>& wanted) {
  for (const bool is_pinned : {true, false})
    for (const bool one_by_one : {true, false}) CopiesCase(wanted, is_pinned).check(one_by_one);
}

void rows_of_a_list(void**) {
  check({{1 << 20, 1, 0}, {1 << 19, 2, 4096}, {48, 300, 80}, {100'000, 3, 8}, {1, 1, 0}});
  check({{16 << 10, 2, 64}, {(16 << 10) - 1, 2, 64}});
  check({{777, 1, 0}});
  check({});
}

// More rows than a batch takes, from few regions and from many.
void long_lists(void**) {
  check({{20'000, 63, 16}});
  check({{20'000, 64, 16}});
  check({{20'000, 200, 16}});
  check(std::vector<Rows>(150, Rows{30'000, 1, 0}));
}

}  // namespace

int main(int argc, char** argv) {
  const test::OpenDevice opened(argc > 1 ? argv[1] : TANDEM_MODULE);
  device = &opened;
  const CMUnitTest tests[] = {cmocka_unit_test(rows_of_a_list), cmocka_unit_test(long_lists)};
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
