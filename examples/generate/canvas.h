// SPDX-License-Identifier: MIT
// A page to draw on: the part of Cairo that both pictures need. Coordinates are pixels, the origin is top left.
#ifndef EXAMPLES_GENERATE_CANVAS_H_
#define EXAMPLES_GENERATE_CANVAS_H_

#include <cairo.h>

#include <cstdint>
#include <string>

#include "failure.h"

namespace generate {

struct Color {
  double r, g, b, a = 1;
};

constexpr Color kInk{0.13, 0.15, 0.19}, kGrey{0.42, 0.45, 0.50}, kFaint{0.88, 0.89, 0.91}, kPaper{1, 1, 1},
    kBand{0.965, 0.97, 0.975};

enum class Align { kLeft, kMiddle, kRight };

class Canvas {
 public:
  Canvas(int32_t width, int32_t height);
  ~Canvas();
  Canvas(const Canvas&) = delete;
  Canvas& operator=(const Canvas&) = delete;

  struct Font {
    double size = 20;
    bool bold = false;
    Color color = kInk;
    Align align = Align::kLeft;
  };
  void text(double x, double baseline, const std::string& words, const Font& font);
  double text_width(const std::string& words, const Font& font);
  void fill(double x, double y, double width, double height, const Color& color);
  struct Pen {
    double width = 1;
    Color color = kInk;
    bool dashed = false;
  };
  void line(double x0, double y0, double x1, double y1, const Pen& pen);
  void dot(double x, double y, double radius, const Color& fill_color, const Color& rim);
  Failure save(const std::string& path);

 private:
  void select(const Font& font);
  cairo_surface_t* surface_;
  cairo_t* cairo_;
};

// Returns "16,384".
std::string with_commas(int64_t value);
std::string percent(double share, int digits);

}  // namespace generate

#endif  // EXAMPLES_GENERATE_CANVAS_H_
