// SPDX-License-Identifier: MIT
// x is the share of the KV bytes that dense attention reads, y the loss in prediction. Each window has a line, whose points
// are the betas. Down and left is better. The shaded corner is the aim: at most 30 % read, at most 1 % lost.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "canvas.h"
#include "picture.h"

namespace generate {
namespace {

constexpr int32_t kWidth = 1300, kHeight = 860, kLeft = 130, kRight = 1040, kTop = 140, kBottom = 740;
constexpr double kAimShare = 0.30, kAimLoss = 0.01;
constexpr Color kAim{0.90, 0.955, 0.91}, kAimText{0.16, 0.45, 0.25};
constexpr Color kLines[] = {{0.80, 0.20, 0.18}, {0.89, 0.56, 0.10}, {0.13, 0.52, 0.62},
                            {0.32, 0.25, 0.60}, {0.25, 0.50, 0.25}, {0.45, 0.45, 0.45}};

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

// Returns a step of 1, 2 or 5 times a power of ten that divides the range into at most `most` pieces.
double tick_step(double range, int most) {
  double step = std::pow(10, std::floor(std::log10(range / most)));
  for (const double factor : {2.0, 2.5, 2.0})
    if (range / step > most) step *= factor;
  return step;
}

struct Plot {
  const CurvePicture& picture;
  Canvas canvas{kWidth, kHeight};
  std::vector<std::pair<double, double>> labels;  // points whose beta is written beside them
  double x_max = 0.4, y_min = 0, y_max = 2 * kAimLoss;

  explicit Plot(const CurvePicture& p) : picture(p) {
    for (const CurvePicture::Point& point : p.points) {
      x_max = std::max(x_max, point.share * 1.08);
      y_min = std::min(y_min, loss(point) * 1.15);
      y_max = std::max(y_max, loss(point) * 1.1);
    }
  }
  double loss(const CurvePicture::Point& point) const { return point.bits_per_byte / picture.dense_bits_per_byte - 1; }
  double x_of(double share) const { return kLeft + share / x_max * (kRight - kLeft); }
  double y_of(double value) const { return kBottom - (value - y_min) / (y_max - y_min) * (kBottom - kTop); }
};

void draw_axes(Plot* plot) {
  Canvas& canvas = plot->canvas;
  const double aim_top = plot->y_of(kAimLoss);
  canvas.fill(kLeft, aim_top, plot->x_of(kAimShare) - kLeft, kBottom - aim_top, kAim);
  for (double share = 0; share <= plot->x_max; share += 0.1) {
    canvas.line(plot->x_of(share), kTop, plot->x_of(share), kBottom, {1, kFaint, false});
    canvas.text(plot->x_of(share), kBottom + 28, percent(share, 0), {17, false, kInk, Align::kMiddle});
  }
  const double step = tick_step(plot->y_max - plot->y_min, 8);
  for (double value = std::ceil(plot->y_min / step) * step; value <= plot->y_max; value += step) {
    canvas.line(kLeft, plot->y_of(value), kRight, plot->y_of(value), {1, kFaint, false});
    canvas.text(kLeft - 12, plot->y_of(value) + 6,
                (value > step / 2 ? "+" : "") + percent(std::abs(value) < step / 2 ? 0 : value, step < 0.00999 ? 1 : 0),
                {17, false, kInk, Align::kRight});
  }
  canvas.line(kLeft, plot->y_of(0), kRight, plot->y_of(0), {2, kInk, false});
  canvas.text(plot->x_of(kAimShare) + 12, plot->y_of(0) - 9, "dense attention", {16, false, kInk, Align::kLeft});
  canvas.text((kLeft + kRight) / 2.0, kBottom + 64, "KV bytes read per decoded token, share of what dense attention reads",
              {18, false, kGrey, Align::kMiddle});
  canvas.text(kLeft, kTop - 16, "bits per byte, relative to dense", {18, false, kGrey, Align::kLeft});
}

// Writes betas beside the points, the ends of a line first. Where points crowd, those between get none.
void draw_betas(Plot* plot, size_t first, size_t end, const Color& color) {
  constexpr double kRoom = 30;
  std::vector<size_t> order = {first};
  if (end - first > 1) order.push_back(end - 1);
  for (size_t i = first + 1; i + 1 < end; ++i) order.push_back(i);
  for (const size_t i : order) {
    const CurvePicture::Point& point = plot->picture.points[i];
    const double x = plot->x_of(point.share), y = plot->y_of(plot->loss(point));
    const bool crowded = std::any_of(plot->labels.begin(), plot->labels.end(), [&](const std::pair<double, double>& label) {
      return std::abs(label.first - x) < 2 * kRoom && std::abs(label.second - y) < kRoom / 2;
    });
    if (crowded) continue;
    plot->labels.push_back({x, y});
    plot->canvas.text(x + 10, y - 10, short_number(point.beta), {15, false, color, Align::kLeft});
  }
}

void draw_window(Plot* plot, size_t first, size_t end, size_t line_idx) {
  Canvas& canvas = plot->canvas;
  const std::vector<CurvePicture::Point>& points = plot->picture.points;
  const Color& color = kLines[line_idx % std::size(kLines)];
  const auto x = [&](size_t i) { return plot->x_of(points[i].share); };
  const auto y = [&](size_t i) { return plot->y_of(plot->loss(points[i])); };
  for (size_t i = first + 1; i < end; ++i) canvas.line(x(i - 1), y(i - 1), x(i), y(i), {2.5, color, false});
  for (size_t i = first; i < end; ++i) canvas.dot(x(i), y(i), 6, color, kPaper);
  draw_betas(plot, first, end, color);
  const double legend = kTop + 46 + 34 * static_cast<double>(line_idx);
  canvas.line(kRight + 40, legend, kRight + 80, legend, {2.5, color, false});
  canvas.dot(kRight + 60, legend, 6, color, kPaper);
  canvas.text(kRight + 92, legend + 6, short_number(points[first].window_percent) + " %", {18, false, kInk, Align::kLeft});
}

void draw_lines(Plot* plot) {
  const std::vector<CurvePicture::Point>& points = plot->picture.points;
  size_t n_lines = 0;
  for (size_t first = 0, end = 0; first < points.size(); first = end) {
    while (end < points.size() && points[end].window_percent == points[first].window_percent) ++end;
    draw_window(plot, first, end, n_lines++);
  }
  plot->canvas.text(kRight + 40, kTop + 14, "window, % of context", {17, true, kInk, Align::kLeft});
  const double below = kTop + 54 + 34 * static_cast<double>(n_lines);
  plot->canvas.text(kRight + 40, below, "figures at points: beta", {16, false, kGrey, Align::kLeft});
  // The legend is beside the plot: inside, the corner may be lower than a line of text.
  plot->canvas.fill(kRight + 40, below + 28, 30, 34, kAim);
  plot->canvas.text(kRight + 80, below + 42, "at most 30 % read,", {16, false, kAimText, Align::kLeft});
  plot->canvas.text(kRight + 80, below + 62, "at most 1 % lost", {16, false, kAimText, Align::kLeft});
}

}  // namespace

Failure draw_curve(const CurvePicture& picture, const std::string& path) {
  Plot plot(picture);
  plot.canvas.text(kLeft, 52, "What leaving keys out costs", {32, true, kInk, Align::kLeft});
  plot.canvas.text(kLeft, 86, picture.subtitle, {18, false, kGrey, Align::kLeft});
  draw_axes(&plot);
  draw_lines(&plot);
  return plot.canvas.save(path);
}

}  // namespace generate
