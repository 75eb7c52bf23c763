// Moves weights onto huge pages in place.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1
#endif
#endif

namespace {

// Asks the system for huge pages wherever these tensors cover at least half of one. Returns how
// many it made: it may refuse all, for mapped files or by its settings.
inline int64_t move_to_huge_pages(const std::vector<at::Tensor>& tensors) {
  int64_t made = 0;
#ifdef __linux__
  constexpr uintptr_t PAGE = 2 << 20;
  std::map<uintptr_t, uintptr_t> covered;  // covered bytes of each page
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu() || !tensor.is_contiguous()) continue;
    const auto first = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const uintptr_t end = first + tensor.nbytes();
    for (uintptr_t page = first / PAGE * PAGE; page < end; page += PAGE)
      covered[page] += std::min(end, page + PAGE) - std::max(first, page);
  }
  for (const auto& [page, bytes] : covered)
    if (2 * bytes >= PAGE) made += !madvise(reinterpret_cast<void*>(page), PAGE, MADV_COLLAPSE);
#endif
  return made;
}

}  // namespace
