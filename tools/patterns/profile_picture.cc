// SPDX-License-Identifier: MIT
#include "tools/patterns/profile_picture.h"

#include <algorithm>
#include <cmath>

namespace tools {
namespace {

constexpr double kWidth = 760, kHeight = 440;
constexpr double kLeft = 72, kEnd = 500, kTop = 68, kFloor = 384;  // the area of the points
constexpr double kLabelStep = 14;                                  // between the labels of two lines
constexpr int kColors = 6;
constexpr const char* kLight[kColors] = {"#57606a", "#0969da", "#1a7f37", "#bc4c00", "#8250df", "#bf3989"};
constexpr const char* kDark[kColors] = {"#9198a1", "#4493f8", "#3fb950", "#f0883e", "#ab7df8", "#f778ba"};
constexpr const char* kDashes[] = {"none", "6 3", "2 3", "8 3 2 3"};  // for the first six lines, the next six, and so on

std::string escaped(const std::string& plain) {
  std::string out;
  for (const char c : plain) out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

std::string style() {
  const auto colors = [](const char* ink, const char* soft, const char* edge, const char* back, const char* const* lines) {
    std::string out = text("text{fill:%s}.soft{fill:%s}line{stroke:%s}.back{fill:%s}", ink, soft, edge, back);
    for (int i = 0; i < kColors; ++i) out += text(".c%d{color:%s}", i, lines[i]);
    return out;
  };
  return "<style>\n" + colors("#1f2328", "#57606a", "#d0d7de", "#ffffff", kLight) +
         "\nline{stroke-width:0.5}polyline{fill:none;stroke:currentColor;stroke-width:1.5}circle,.label{fill:currentColor}"
         "\n" +
         "@media (prefers-color-scheme:dark){" + colors("#f0f6fc", "#9198a1", "#3d444d", "#0d1117", kDark) +
         ".label{fill:currentColor}}\n</style>\n";
}

// A range of positive numbers on a logarithmic scale.
struct LogAxis {
  double low, high;   // range of the numbers
  double begin, end;  // range in the picture
  double at(double value) const { return begin + (end - begin) * std::log(value / low) / std::log(high / low); }
};

struct Axes {
  LogAxis x, y;
  std::vector<int64_t> lengths;
};

Axes axes_of(const std::vector<std::vector<ProfilePoint>>& lines) {
  Axes axes = {{0, 0, kLeft + 12, kEnd - 12}, {0, 0, kFloor, kTop}, {}};
  double least_ns = INFINITY, most_ns = 0;
  for (const auto& line : lines)
    for (const ProfilePoint& point : line) {
      least_ns = std::min(least_ns, point.ns);
      most_ns = std::max(most_ns, point.ns);
      axes.lengths.push_back(point.kv_len);
    }
  std::sort(axes.lengths.begin(), axes.lengths.end());
  axes.lengths.erase(std::unique(axes.lengths.begin(), axes.lengths.end()), axes.lengths.end());
  const double pad = axes.lengths.size() == 1 ? 1.4 : 1.0;
  axes.x.low = static_cast<double>(axes.lengths.front()) / pad;
  axes.x.high = static_cast<double>(axes.lengths.back()) * pad;
  axes.y.low = least_ns / 1e6 / 1.25;
  axes.y.high = most_ns / 1e6 * 1.25;
  return axes;
}

std::string label(double x, double y, const char* attributes, const std::string& words) {
  return text("<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, attributes, escaped(words).c_str());
}

std::string grid(const Axes& axes) {
  std::string out;
  for (const int64_t length : axes.lengths) {
    const double x = axes.x.at(static_cast<double>(length));
    out += text("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x, kTop, x, kFloor);
    out += label(x, kFloor + 18, "class=\"soft\" text-anchor=\"middle\"", std::to_string(length));
  }
  const int first = static_cast<int>(std::floor(std::log10(axes.y.low)));
  const int last = static_cast<int>(std::ceil(std::log10(axes.y.high)));
  for (int power = first; power <= last; ++power)
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double ms = digit * std::pow(10.0, power);
      if (ms < axes.y.low || ms > axes.y.high) continue;
      const double y = axes.y.at(ms);
      out += text("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", kLeft, y, kEnd, y);
      out += label(kLeft - 8, y + 4, "class=\"soft\" text-anchor=\"end\"", text("%g", ms));
    }
  return out + label((kLeft + kEnd) / 2, kFloor + 40, "class=\"soft\" text-anchor=\"middle\"", "keys of the sequence");
}

// Returns the heights of the labels of lines that end at the heights `ends`: in the same order, and without overlap.
std::vector<double> label_heights(const std::vector<double>& ends) {
  std::vector<size_t> order(ends.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ends[a] < ends[b]; });
  std::vector<double> heights(ends.size());
  double lowest_free = kTop;
  for (const size_t i : order) {
    heights[i] = std::max(ends[i], lowest_free);
    lowest_free = heights[i] + kLabelStep;
  }
  return heights;
}

std::string line(const Axes& axes, const std::vector<ProfilePoint>& points, const std::string& name, size_t i) {
  std::string places, circles;
  for (const ProfilePoint& point : points) {
    const double x = axes.x.at(static_cast<double>(point.kv_len)), y = axes.y.at(point.ns / 1e6);
    places += text("%.1f,%.1f ", x, y);
    circles += text("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\"><title>%s, %lld keys: %.3g ms</title></circle>\n", x, y,
                    escaped(name).c_str(), static_cast<long long>(point.kv_len), point.ns / 1e6);
  }
  return text("<g class=\"c%d\">\n<polyline points=\"%s\" stroke-dasharray=\"%s\"/>\n", static_cast<int>(i % kColors),
              places.c_str(), kDashes[i / kColors % std::size(kDashes)]) +
         circles;
}

}  // namespace

std::string profile_svg(const Profile& profile, const std::vector<std::string>& patterns) {
  std::vector<std::vector<ProfilePoint>> lines;
  for (const std::string& name : patterns) lines.push_back(profile.points(name));
  const Axes axes = axes_of(lines);
  std::vector<double> ends;
  for (const auto& points : lines) ends.push_back(axes.y.at(points.back().ns / 1e6));
  const std::vector<double> heights = label_heights(ends);
  const double height = std::max(kHeight, *std::max_element(heights.begin(), heights.end()) + 2 * kLabelStep);
  std::string out = text(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"Helvetica, Arial, DejaVu Sans, "
      "sans-serif\" font-size=\"11\">\n",
      kWidth, height);
  out += style() + "<rect class=\"back\" width=\"100%\" height=\"100%\"/>\n";
  out += label(16, 28, "font-size=\"16\" font-weight=\"bold\"", "Time of one append by head pattern and length");
  out += label(16, 48, "class=\"soft\" font-size=\"12\"",
               "ms of a call in one layer whose heads all have the pattern; both scales are logarithmic");
  out += grid(axes);
  for (size_t i = 0; i < lines.size(); ++i) {
    const double x = axes.x.at(static_cast<double>(lines[i].back().kv_len));
    out += line(axes, lines[i], patterns[i], i) +
           label(std::max(x, kEnd) + 10, heights[i] + 4, "class=\"label\"", patterns[i]) + "</g>\n";
  }
  return out + "</svg>\n";
}

}  // namespace tools
