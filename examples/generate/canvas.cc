// SPDX-License-Identifier: MIT
#include "canvas.h"

#include <cstdio>

namespace generate {

Canvas::Canvas(int32_t width, int32_t height)
    : surface_(cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height)), cairo_(cairo_create(surface_)) {
  fill(0, 0, width, height, kPaper);
}

Canvas::~Canvas() {
  cairo_destroy(cairo_);
  cairo_surface_destroy(surface_);
}

void Canvas::select(const Font& font) {
  cairo_select_font_face(cairo_, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                         font.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(cairo_, font.size);
  cairo_set_source_rgba(cairo_, font.color.r, font.color.g, font.color.b, font.color.a);
}

double Canvas::text_width(const std::string& words, const Font& font) {
  select(font);
  cairo_text_extents_t extents;
  cairo_text_extents(cairo_, words.c_str(), &extents);
  return extents.x_advance;
}

void Canvas::text(double x, double baseline, const std::string& words, const Font& font) {
  const double width = text_width(words, font);
  const double shift = font.align == Align::kLeft ? 0 : font.align == Align::kMiddle ? width / 2 : width;
  cairo_move_to(cairo_, x - shift, baseline);
  cairo_show_text(cairo_, words.c_str());
}

void Canvas::fill(double x, double y, double width, double height, const Color& color) {
  cairo_set_source_rgba(cairo_, color.r, color.g, color.b, color.a);
  cairo_rectangle(cairo_, x, y, width, height);
  cairo_fill(cairo_);
}

void Canvas::line(double x0, double y0, double x1, double y1, const Pen& pen) {
  const double dash[] = {6, 5};
  cairo_set_dash(cairo_, dash, pen.dashed ? 2 : 0, 0);
  cairo_set_line_width(cairo_, pen.width);
  cairo_set_source_rgba(cairo_, pen.color.r, pen.color.g, pen.color.b, pen.color.a);
  cairo_move_to(cairo_, x0, y0);
  cairo_line_to(cairo_, x1, y1);
  cairo_stroke(cairo_);
}

void Canvas::dot(double x, double y, double radius, const Color& fill_color, const Color& rim) {
  cairo_set_dash(cairo_, nullptr, 0, 0);
  cairo_new_path(cairo_);  // otherwise Cairo joins the arc to the end of the last word
  cairo_arc(cairo_, x, y, radius, 0, 6.283185307179586);
  cairo_set_source_rgba(cairo_, fill_color.r, fill_color.g, fill_color.b, fill_color.a);
  cairo_fill_preserve(cairo_);
  cairo_set_line_width(cairo_, 2);
  cairo_set_source_rgba(cairo_, rim.r, rim.g, rim.b, rim.a);
  cairo_stroke(cairo_);
}

Failure Canvas::save(const std::string& path) {
  cairo_surface_flush(surface_);
  const cairo_status_t status = cairo_surface_write_to_png(surface_, path.c_str());
  if (status != CAIRO_STATUS_SUCCESS) return {path + ": " + cairo_status_to_string(status)};
  return {};
}

std::string with_commas(int64_t value) {
  std::string out = std::to_string(value);
  for (int64_t place = static_cast<int64_t>(out.size()) - 3; place > 0; place -= 3) out.insert(place, ",");
  return out;
}

std::string percent(double share, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %%", digits, 100 * share);
  return text;
}

}  // namespace generate
