// SPDX-License-Identifier: MIT
// Checks pixels of tandem-demo's pictures where the right colour is known.
#include "picture.h"

#include <cairo.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>

#include "stop_test.h"

namespace {

using namespace generate;

struct Image {
  cairo_surface_t* surface;
  explicit Image(const std::string& path) : surface(cairo_image_surface_create_from_png(path.c_str())) {
    if (cairo_surface_status(surface) != CAIRO_STATUS_SUCCESS) STOP_TEST("%s cannot be read", path.c_str());
  }
  ~Image() { cairo_surface_destroy(surface); }
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;
  int width() const { return cairo_image_surface_get_width(surface); }
  int height() const { return cairo_image_surface_get_height(surface); }
  uint32_t at(int x, int y) const {
    const unsigned char* row = cairo_image_surface_get_data(surface) + y * cairo_image_surface_get_stride(surface);
    return reinterpret_cast<const uint32_t*>(row)[x] & 0xffffff;
  }
};

std::string make_path() {
  char name[] = "/tmp/tandem-picture-test-XXXXXX";
  const int file = mkstemp(name);
  if (file < 0) STOP_TEST("no file in /tmp");
  close(file);
  return name;
}

// Two heads that keep every token except the one before the window.
KeptPicture all_kept(int64_t n_tokens) {
  KeptPicture picture;
  picture.subtitle = "a test";
  picture.n_tokens = n_tokens;
  picture.sink_tokens = 0;
  picture.window_tokens = n_tokens / 16;
  for (int64_t head_idx = 0; head_idx < 2; ++head_idx) {
    KeptPicture::Band band{0, head_idx, {}};
    for (int64_t token_idx = 0; token_idx < n_tokens; ++token_idx)
      if (token_idx != n_tokens - picture.window_tokens - 1) band.kept.push_back(token_idx);
    picture.bands.push_back(std::move(band));
  }
  return picture;
}

// Heads that keep all keys have one colour everywhere, and the bars below have one height, whatever the number of tokens
// per pixel.
void what_is_kept_evenly_looks_even(void**) {
  const std::string path = make_path();
  for (const int64_t n_tokens : {16384, 1301, 2000, 700, 1300}) {
    if (Failure failure = draw_kept(all_kept(n_tokens), path)) STOP_TEST("%s", failure.message.c_str());
    const Image image(path);
    assert_int_equal(image.width(), 1600);
    // Band 0 is at y = 190 and the bars hang from 284 to 344. The window begins at 1,368.
    for (const int y : {200, 240, 285, 340})
      for (int x = 155; x < 1360; ++x)
        if (image.at(x, y) != image.at(154, y))
          STOP_TEST("%d tokens: pixel %d, %d is %06x, pixel 154 is %06x", static_cast<int>(n_tokens), x, y, image.at(x, y),
                    image.at(154, y));
  }
  unlink(path.c_str());
}

// Returns whether the pixel has the colour of the text about the aim, smoothed edges included.
bool is_green_word(uint32_t pixel) {
  const auto near = [&](int shift, int value) { return std::abs(static_cast<int>(pixel >> shift & 255) - value) < 30; };
  return near(16, 41) && near(8, 115) && near(0, 64);
}

// With a loss of 5,000 % the aim is lower than a line of text. Its text must not overlap the axis.
void a_low_aim_leaves_the_axis_alone(void**) {
  const std::string path = make_path();
  CurvePicture picture;
  picture.subtitle = "a test";
  picture.dense_bits_per_byte = 1;
  picture.points = {{10, 1, 0.2, 51}, {10, 2, 0.1, 40}};
  if (Failure failure = draw_curve(picture, path)) STOP_TEST("%s", failure.message.c_str());
  const Image image(path);
  int n_in_plot = 0, n_beside = 0;
  for (int y = 0; y < image.height(); ++y)
    for (int x = 0; x < image.width(); ++x)
      if (is_green_word(image.at(x, y))) ++(x < 1040 ? n_in_plot : n_beside);
  assert_int_equal(n_in_plot, 0);
  assert_true(n_beside > 20);
  unlink(path.c_str());
}

}  // namespace

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(what_is_kept_evenly_looks_even),
      cmocka_unit_test(a_low_aim_leaves_the_axis_alone),
  };
  return cmocka_run_group_tests(tests, nullptr, nullptr);
}
