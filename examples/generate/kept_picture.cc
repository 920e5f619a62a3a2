// SPDX-License-Identifier: MIT
// One band per KV head. Its colour, from pale to deep, is the share of the keys under each pixel that the head kept.
//
//            pass key   amber
//   layer 0  |..:.|....|::...|..        | window | 9 %
//            ...
// all heads: the share of them that kept a key
#include <algorithm>
#include <cmath>
#include <numeric>

#include "canvas.h"
#include "picture.h"

namespace generate {
namespace {

constexpr int32_t kWidth = 1600, kLeft = 150, kRight = 1450, kTop = 190, kBandHeight = 34, kBandGap = 6, kLayerGap = 12;
constexpr Color kWindow{0.36, 0.47, 0.62}, kFact{0.05, 0.53, 0.42}, kAsked{0.80, 0.11, 0.35};

// Pale yellow to orange to deep red, by the share of kept keys under a pixel. The root keeps small shares visible.
Color heat(double share) {
  const double t = std::sqrt(std::clamp(share, 0.0, 1.0));
  constexpr Color kStops[] = {{1.0, 0.90, 0.66}, {0.98, 0.66, 0.26}, {0.86, 0.30, 0.12}, {0.45, 0.04, 0.10}};
  const double place = t * 3;
  const int i = std::min(2, static_cast<int>(place));
  const double f = place - i;
  return {kStops[i].r + f * (kStops[i + 1].r - kStops[i].r), kStops[i].g + f * (kStops[i + 1].g - kStops[i].g),
          kStops[i].b + f * (kStops[i + 1].b - kStops[i].b)};
}

struct Layout {
  const KeptPicture& picture;
  Canvas canvas;
  const int64_t window_begin;
  explicit Layout(const KeptPicture& p) : picture(p), canvas(kWidth, height(p)), window_begin(window_first()) {}

  static int32_t bands_bottom(const KeptPicture& p) { return static_cast<int32_t>(band_top(p, p.bands.size())); }
  static int32_t height(const KeptPicture& p) { return bands_bottom(p) + 250; }
  static double band_top(const KeptPicture& p, size_t band_idx) {
    const size_t last = std::min(band_idx, p.bands.size() - 1);
    const int64_t gaps = p.bands[last].layer_idx - p.bands[0].layer_idx;
    return kTop + static_cast<double>(band_idx) * (kBandHeight + kBandGap) + static_cast<double>(gaps) * kLayerGap;
  }
  double x_of(int64_t token_idx) const {
    return kLeft + static_cast<double>(token_idx) / static_cast<double>(picture.n_tokens) * (kRight - kLeft);
  }
  // Tokens leave the window in blocks, so it may be longer than requested: it is the run of newest tokens that all heads
  // keep.
  int64_t window_first() const {
    int64_t first = 0;
    for (const KeptPicture::Band& band : picture.bands) {
      size_t i = band.kept.size();
      while (i > 1 && band.kept[i - 2] + 1 == band.kept[i - 1]) --i;
      first = std::max(first, i > 0 ? band.kept[i - 1] : picture.n_tokens);
    }
    return std::min(first, std::max<int64_t>(0, picture.n_tokens - picture.window_tokens));
  }
  // Returns, for each pixel, the mean of `per_token` over only its own tokens. Pixels differ by a token or two, so dividing
  // by their mean number would draw a comb. If tokens are wider than pixels, a pixel shows the token that it is in.
  std::vector<double> per_pixel(const std::vector<int64_t>& per_token) const {
    constexpr int64_t kPixels = kRight - kLeft;
    std::vector<int64_t> before(per_token.size() + 1);
    std::partial_sum(per_token.begin(), per_token.end(), before.begin() + 1);
    std::vector<double> out;
    for (int64_t x = 0; x < kPixels; ++x) {
      const int64_t first = x * picture.n_tokens / kPixels;
      const int64_t end = std::max(first + 1, (x + 1) * picture.n_tokens / kPixels);
      out.push_back(static_cast<double>(before[end] - before[first]) / static_cast<double>(end - first));
    }
    return out;
  }
  bool by_rule(int64_t token_idx) const { return token_idx >= picture.sink_tokens && token_idx < window_begin; }
};

bool keeps_any(const KeptPicture::Band& band, const KeptPicture::Mark& mark) {
  const auto it = std::lower_bound(band.kept.begin(), band.kept.end(), mark.first);
  return it != band.kept.end() && *it < mark.first + mark.n_tokens;
}

void draw_band(Layout* page, size_t band_idx) {
  const KeptPicture& picture = page->picture;
  const KeptPicture::Band& band = picture.bands[band_idx];
  const double y = Layout::band_top(picture, band_idx);
  Canvas& canvas = page->canvas;
  canvas.fill(kLeft, y, kRight - kLeft, kBandHeight, kBand);
  std::vector<int64_t> kept(picture.n_tokens);
  for (const int64_t token_idx : band.kept) kept[token_idx] = page->by_rule(token_idx);
  const std::vector<double> shares = page->per_pixel(kept);
  for (int32_t x = 0; x < kRight - kLeft; ++x)
    if (shares[x] > 0) canvas.fill(kLeft + x, y, 1, kBandHeight, heat(shares[x]));
  canvas.fill(kLeft, y, std::max(2.0, page->x_of(picture.sink_tokens) - kLeft), kBandHeight, kWindow);
  canvas.fill(page->x_of(page->window_begin), y, kRight - page->x_of(page->window_begin), kBandHeight, kWindow);

  Canvas::Font label{17, false, kInk, Align::kRight};
  canvas.text(kLeft - 14, y + 23, "layer " + std::to_string(band.layer_idx) + "  head " + std::to_string(band.kv_head_idx),
              label);
  label.align = Align::kLeft;
  canvas.text(kRight + 14, y + 23, percent(static_cast<double>(band.kept.size()) / static_cast<double>(picture.n_tokens), 1),
              label);
}

void draw_marks(Layout* page) {
  const KeptPicture& picture = page->picture;
  const double bottom = Layout::bands_bottom(picture);
  for (const KeptPicture::Mark& mark : picture.marks) {
    const double x = page->x_of(mark.first + mark.n_tokens / 2);
    const Color color = mark.asked ? kAsked : kFact;
    page->canvas.line(x, kTop - 14, x, bottom, {1.5, {color.r, color.g, color.b, 0.75}, false});
    page->canvas.text(x, kTop - 22, mark.name, {17, mark.asked, color, Align::kMiddle});
    for (size_t i = 0; i < picture.bands.size(); ++i)
      page->canvas.dot(x, Layout::band_top(picture, i) + kBandHeight / 2.0, 5,
                       keeps_any(picture.bands[i], mark) ? color : kPaper, color);
  }
}

// Draws bars below the bands: for each pixel the mean share of heads that keep a key there.
void draw_sum(Layout* page) {
  constexpr double kHeight = 60;
  const KeptPicture& picture = page->picture;
  const double top = Layout::bands_bottom(picture) + 14;
  std::vector<int64_t> n_heads(picture.n_tokens);
  for (const KeptPicture::Band& band : picture.bands)
    for (const int64_t token_idx : band.kept) ++n_heads[token_idx];
  const std::vector<double> means = page->per_pixel(n_heads);
  page->canvas.fill(kLeft, top, kRight - kLeft, kHeight, kBand);
  for (int32_t x = 0; x < kRight - kLeft; ++x) {
    const double height = kHeight * means[x] / static_cast<double>(picture.bands.size());
    page->canvas.fill(kLeft + x, top + kHeight - height, 1, height, kGrey);
  }
  page->canvas.text(kLeft - 14, top + 27, "share of", {17, false, kInk, Align::kRight});
  page->canvas.text(kLeft - 14, top + 49, "heads", {17, false, kInk, Align::kRight});
  const double axis = top + kHeight;
  page->canvas.line(kLeft, axis, kRight, axis, {1, kGrey, false});
  int64_t tick = 1;
  while (picture.n_tokens / tick > 10) tick *= 2;
  for (int64_t token_idx = 0; token_idx <= picture.n_tokens; token_idx += tick) {
    page->canvas.line(page->x_of(token_idx), axis, page->x_of(token_idx), axis + 7, {1, kGrey, false});
    page->canvas.text(page->x_of(token_idx), axis + 27, with_commas(token_idx), {16, false, kInk, Align::kMiddle});
  }
  page->canvas.text((kLeft + kRight) / 2.0, axis + 54, "position in the text (tokens, here bytes)",
                    {17, false, kGrey, Align::kMiddle});
}

void draw_legend(Layout* page) {
  Canvas& canvas = page->canvas;
  const double y = Layout::height(page->picture) - 54;
  double x = kLeft;
  const auto word = [&](const std::string& words) {
    canvas.text(x, y + 16, words, {16, false, kInk, Align::kLeft});
    x += canvas.text_width(words, {16}) + 34;
  };
  canvas.fill(x, y, 30, 20, kWindow);
  x += 40;
  word("always attended: sinks and window");
  for (int i = 0; i < 120; ++i) canvas.fill(x + i, y, 1, 20, heat((i + 1) / 120.0));
  x += 130;
  word("kept by the rule: few … all keys here");
  canvas.dot(x + 6, y + 10, 5, kFact, kFact);
  x += 20;
  word("a hidden fact, kept");
  canvas.dot(x + 6, y + 10, 5, kPaper, kFact);
  x += 20;
  word("not kept");
  canvas.dot(x + 6, y + 10, 5, kAsked, kAsked);
  x += 20;
  word("the one asked about");
}

}  // namespace

bool have_pictures() { return true; }

Failure draw_kept(const KeptPicture& picture, const std::string& path) {
  Layout page(picture);
  page.canvas.text(kLeft, 56, "Which keys each head kept", {34, true, kInk, Align::kLeft});
  page.canvas.text(kLeft, 94, picture.subtitle, {19, false, kGrey, Align::kLeft});
  page.canvas.text(kRight + 14, kTop - 22, "kept", {17, false, kGrey, Align::kLeft});
  for (size_t i = 0; i < picture.bands.size(); ++i) draw_band(&page, i);
  draw_marks(&page);
  draw_sum(&page);
  draw_legend(&page);
  return page.canvas.save(path);
}

}  // namespace generate
