// SPDX-License-Identifier: MIT
#include "lib/pieces/rebuilt_pieces.h"

#include <algorithm>

namespace tandem {
namespace {

Status check_rebuilt(const Layer& layer, size_t l) {
  const char* why = nullptr;
  if (layer.projection == nullptr)
    why = "has no projection (tandem_layer_options)";
  else if (layer.x_type == 0)
    why = "has no hidden states in the cache (x_type = 0 of tandem_cache_options)";
  else if (layer.rope != nullptr)
    why = "has keys that the library rotates, which the store has as they were before";
  else if (layer.k_rotation != TANDEM_ROTATION_NONE)
    why = "has keys that are rotated as they are stored (k_rotation)";
  if (why == nullptr) return {};
  return fail(TANDEM_ERROR_UNSUPPORTED, "route", "route = \"recompute\": layer %zu %s", l, why);
}

// Returns how many pages the newest piece may have.
int64_t most_pages(const RebuildLayout& layout, const RebuiltPieces& pieces) {
  if (pieces.planned_pages == 0) return layout.n_pages;
  const int64_t few = layout.few_pages(), left = pieces.planned_pages - pieces.pieces.back().first_page;
  if (pieces.pieces.size() == 1 || left <= few) return few;
  return std::min(left - few, layout.n_pages);
}

}  // namespace

Status make_rebuild_layouts(const std::vector<Layer>& layers, int64_t buffer_bytes, std::vector<RebuildLayout>* layouts) {
  for (size_t l = 0; l < layers.size(); ++l) {
    TANDEM_TRY(check_rebuilt(layers[l], l));
    RebuildLayout made;
    made.x_bytes = layers[l].x_bytes();
    // A piece has the pages that a buffer holds in 16 bits, whatever the storage type: K, V and sums of a piece take several
    // times its memory.
    const int64_t least_bytes = RebuildLayout::kPageLen * 2 * layers[l].hidden_dim();
    made.n_pages = std::min(buffer_bytes / least_bytes, RebuildLayout::kMostPages);
    if (made.n_pages == 0)
      return fail(TANDEM_ERROR_INVALID_ARGUMENT, "stream_buffer_bytes",
                  "stream_buffer_bytes = %lld is less than the %lld bytes of %d hidden states in 16 bits",
                  static_cast<long long>(buffer_bytes), static_cast<long long>(least_bytes), RebuildLayout::kPageLen);
    made.page_bytes = made.lay_out(layers[l], layers[l].n_kv_heads, RebuildLayout::kPageLen);
    layouts->push_back(made);
  }
  return {};
}

bool is_rebuild_less(const Layer& layer) { return layer.x_type != 0 && layer.x_bytes() < token_kv_bytes(layer); }

int64_t rebuilt_tokens(int64_t wanted, int64_t begin, int64_t end) {
  if (wanted <= 0) return 0;
  if (wanted >= end - begin) return end - begin;
  const int64_t page_end =
      (begin + wanted + RebuildLayout::kPageLen - 1) / RebuildLayout::kPageLen * RebuildLayout::kPageLen;
  return std::min(page_end, end) - begin;
}

// Allows for a share that may take all keys of one sequence, and for ends within a page.
void RebuiltCount::add(int64_t n_tokens, int64_t n_runs) {
  if (n_tokens == 0) return;
  n_pages += n_tokens / RebuildLayout::kPageLen + 2 + n_runs;
  n_parts += n_runs;
}

void add_rebuilt(const RebuildLayout& layout, size_t call, TokenRange tokens, bool continues, RebuiltPieces* pieces) {
  for (int64_t t = tokens.begin; t < tokens.end; continues = false) {
    if (!continues || pieces->empty() || pieces->pieces.back().n_pages >= most_pages(layout, *pieces))
      pieces->pieces.push_back({pieces->parts.size(), 0, 0, pieces->n_pages()});
    RebuiltPiece& piece = pieces->pieces.back();
    const int64_t room_end =
        (t / RebuildLayout::kPageLen + most_pages(layout, *pieces) - piece.n_pages) * RebuildLayout::kPageLen;
    pieces->parts.push_back({call, t, std::min(tokens.end, room_end), piece.n_pages});
    piece.n_pages += pieces->parts.back().n_pages();
    ++piece.n_parts;
    t = pieces->parts.back().end;
  }
}

}  // namespace tandem
