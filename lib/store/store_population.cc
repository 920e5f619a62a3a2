// SPDX-License-Identifier: MIT
#include "lib/store/store_population.h"

#include <sys/mman.h>

#include <algorithm>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // from Linux 5.14; the C library's headers may be older than the kernel
#endif

namespace tandem {

StorePopulation::StorePopulation(Worker& worker) : worker_(worker) {
  job_.run = [](void* self) { static_cast<StorePopulation*>(self)->populate_next(); };
  job_.context = this;
  job_.is_hint = true;
}

StorePopulation::~StorePopulation() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  worker_.cancel(job_);
}

void StorePopulation::grow(size_t n) {
  if (n <= is_asked_.size()) return;
  const std::lock_guard lock(mutex_);
  stretches_.reserve(n);
  is_asked_.resize(n, false);
}

void StorePopulation::ask(size_t extent, std::byte* data, int64_t bytes) {
  if (is_asked_[extent]) return;
  {
    const std::lock_guard lock(mutex_);
    is_asked_[extent] = true;
    stretches_.push_back({data, bytes});
  }
  worker_.post(job_);
}

void StorePopulation::forget(size_t extent, const std::byte* data, int64_t bytes) {
  if (extent >= is_asked_.size()) return;
  const auto is_within = [&](const std::byte* at) { return at >= data && at < data + bytes; };
  std::unique_lock lock(mutex_);
  is_asked_[extent] = false;
  std::erase_if(stretches_, [&](const Stretch& stretch) { return is_within(stretch.data); });
  changed_.wait(lock, [&] { return !is_within(at_work_); });
}

void StorePopulation::populate_next() {
  constexpr int64_t kSliceBytes = int64_t{8} << 20;  // 2 ms
  Stretch slice{};
  {
    const std::lock_guard lock(mutex_);
    if (stops_ || stretches_.empty()) return;
    Stretch& rest = stretches_.back();
    slice = {rest.data, std::min(kSliceBytes, rest.bytes)};
    rest = {rest.data + slice.bytes, rest.bytes - slice.bytes};
    if (rest.bytes == 0) stretches_.pop_back();
    at_work_ = slice.data;
  }
  const bool is_populated = madvise(slice.data, static_cast<size_t>(slice.bytes), MADV_POPULATE_WRITE) == 0;
  const std::lock_guard lock(mutex_);
  at_work_ = nullptr;
  changed_.notify_all();
  if (!is_populated) stretches_.clear();  // the kernel is too old, or short of memory
  if (!stops_ && !stretches_.empty()) worker_.post(job_);
}

}  // namespace tandem
