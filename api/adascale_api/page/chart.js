// Line charts and stacked areas in SVG, with a cursor for the pointer and the arrow keys.

import { element, setAttributes, setText, svgElement } from "./dom.js";
import { isMissing } from "./format.js";

const LEFT = 60, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 176;
const MAX_MARKS = 200;

// The position of the cursor, which charts share. `null` is the newest point.
export class Cursor {
  constructor() {
    this.x = null;
    this.charts = new Set();
  }

  move(x) {
    this.x = x;
    for (const chart of this.charts) chart.drawCursor();
  }
}

// series: [{name, style}]; formatX(x, span) and formatY(y) return texts; isWhole: the values are integers.
export class Chart {
  constructor({ title, headingLevel = 3, series, formatX, formatY, isStacked = false, isStepped = false, isWhole = false, least = null, cursor = new Cursor() }) {
    Object.assign(this, { title, series, formatX, formatY, isStacked, isStepped, isWhole, least, cursor });
    this.xs = [];
    this.ys = [];
    this.marks = [];
    this.readout = element("span", { class: "readout" });
    this.drawing = svgElement("g");
    this.cursorLine = svgElement("line", { class: "cursor", visibility: "hidden", y1: TOP, y2: HEIGHT - BOTTOM });
    this.svg = svgElement("svg", { class: "chart", role: "slider", tabindex: 0, "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no data" }, this.drawing, this.cursorLine);
    this.legend = element("ul", { class: "legend" });
    this.node = element("figure", {}, element("figcaption", {}, element(`h${headingLevel}`, {}, title), this.readout), this.svg, this.legend);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => cursor.move(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.svg.addEventListener("blur", () => cursor.move(null));
    cursor.charts.add(this);
    this.drawLegend();
  }

  // marks: [{x, isLoss}]; range: [first, last] of the axis, or null for that of the points.
  setData(xs, ys, { marks = [], range = null, series = this.series } = {}) {
    const isSame = series.length === this.series.length && series.every((each, at) => each.name === this.series[at].name);
    this.series = series;
    if (!isSame) this.drawLegend();
    Object.assign(this, { xs, ys, marks: marks.slice(-MAX_MARKS), range });
    if (this.width) this.draw();
  }

  drawLegend() {
    if (this.series.length < 2) return this.legend.replaceChildren();
    this.legend.replaceChildren(...this.series.map(({ name, style }) => {
      const sign = this.isStacked
        ? svgElement("rect", { width: 14, height: 10, class: `fill-${style}` })
        : svgElement("line", { x1: 0, x2: 18, y1: 5, y2: 5, "stroke-width": 2, class: `stroke-${style}` });
      return element("li", {}, svgElement("svg", { "aria-hidden": "true", viewBox: "0 0 18 10" }, sign), name);
    }));
  }

  draw() {
    const { xs } = this;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const curves = this.isStacked ? stack(this.ys) : this.ys;
    const [x0, x1] = this.range ?? extent([xs]);
    let [y0, y1] = extent(curves);
    if (this.isStacked || this.least !== null) y0 = Math.min(this.least ?? 0, y0);
    const ticks = niceTicks(y0, y1, 4, this.isWhole ? 1 : 0);
    [y0, y1] = [Math.min(y0, ticks[0]), Math.max(y1, ticks.at(-1))];
    const right = Math.max(this.width - RIGHT, LEFT + 1);
    this.toX = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (right - LEFT);
    this.toY = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0 || 1)) * (HEIGHT - BOTTOM - TOP);
    this.fromX = (px) => x0 + ((px - LEFT) / (right - LEFT)) * (x1 - x0);
    const parts = [];
    for (const tick of ticks) {
      const y = this.toY(tick).toFixed(1);
      parts.push(svgElement("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
      parts.push(svgElement("text", { class: "axis", x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, this.formatY(tick)));
    }
    // All points may have the same place, which has one label then; so have places with the same text.
    let before = null;
    const places = x0 === x1 ? 1 : Math.max(2, Math.min(5, Math.floor((right - LEFT) / 90)));
    for (let at = 0; at < places && xs.length; at++) {
      const x = at ? x0 + ((x1 - x0) * at) / (places - 1) : x0;
      const anchor = at === 0 ? "start" : at === places - 1 ? "end" : "middle";
      const label = this.formatX(x, x1 - x0);
      if (label !== before) parts.push(svgElement("text", { class: "axis", x: this.toX(x).toFixed(1), y: HEIGHT - 6, "text-anchor": anchor }, label));
      before = label;
    }
    for (const mark of this.marks) {
      if (mark.x < x0 || mark.x > x1) continue;
      const x = this.toX(mark.x).toFixed(1);
      parts.push(svgElement("line", { class: mark.isLoss ? "mark loss" : "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
      if (mark.isLoss) parts.push(svgElement("path", { class: "loss-sign", d: `M${x} ${TOP + 7}l-4-7h8z` }));
    }
    if (this.isStacked) {
      curves.forEach((curve, at) => parts.push(svgElement("path", { class: `area fill-${this.series[at].style}`, d: this.area(curve, at ? curves[at - 1] : null) })));
    } else {
      curves.forEach((curve, at) => parts.push(svgElement("path", { class: `curve stroke-${this.series[at].style}`, d: this.line(curve) })));
    }
    if (!xs.length) parts.push(svgElement("text", { class: "axis", x: (LEFT + right) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no data yet"));
    this.drawing.replaceChildren(...parts);
    this.drawCursor();
  }

  line(curve) {
    let d = "";
    let isDown = false;
    const { xs } = this;
    for (let at = 0; at < xs.length; at++) {
      const y = curve[at];
      if (isMissing(y)) continue; // not measured since the point before
      const px = this.toX(xs[at]).toFixed(1), py = this.toY(y).toFixed(1);
      d += isDown ? (this.isStepped ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}h.01`;
      isDown = true;
    }
    return d;
  }

  area(curve, below) {
    const { xs } = this;
    if (!xs.length) return "";
    const bottom = this.toY(0);
    let d = `M${this.toX(xs[0]).toFixed(1)} ${bottom.toFixed(1)}`;
    for (let at = 0; at < xs.length; at++) d += `L${this.toX(xs[at]).toFixed(1)} ${this.toY(curve[at]).toFixed(1)}`;
    for (let at = xs.length - 1; at >= 0; at--) d += `L${this.toX(xs[at]).toFixed(1)} ${this.toY(below ? below[at] : 0).toFixed(1)}`;
    return `${d}Z`;
  }

  point(event) {
    if (!this.xs.length) return;
    const box = this.svg.getBoundingClientRect();
    this.cursor.move(this.fromX(event.clientX - box.left));
  }

  press(event) {
    const last = this.xs.length - 1;
    if (last < 0) return;
    const at = this.cursor.x === null ? last : nearest(this.xs, this.cursor.x);
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -20, PageUp: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.cursor.move(null);
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.cursor.move(this.xs[Math.max(0, Math.min(last, at + steps[event.key]))]);
  }

  drawCursor() {
    const { xs, ys, cursor } = this;
    if (!xs.length || !this.toX) return setText(this.readout, "");
    const at = cursor.x === null ? xs.length - 1 : nearest(xs, cursor.x);
    const values = this.series.map(({ name }, each) => ({ name, value: latest(ys[each], at) }));
    const shown = this.isStacked
      ? [{ name: "all", value: values.reduce((sum, { value }) => sum + value, 0) }, ...values.filter(({ value }) => value > 0)].slice(0, cursor.x === null ? 1 : 9)
      : values;
    const named = shown.map(({ name, value }) => (this.series.length > 1 ? `${name} ${this.formatY(value)}` : this.formatY(value)));
    const text = `${cursor.x === null ? "" : `${this.formatX(xs[at], 0)}: `}${named.join(", ")}`;
    setText(this.readout, text);
    setAttributes(this.svg, { "aria-valuemax": xs.length - 1, "aria-valuenow": at, "aria-valuetext": `${this.formatX(xs[at], 0)}: ${named.join(", ")}` });
    const x = this.toX(xs[at]).toFixed(1);
    setAttributes(this.cursorLine, { visibility: cursor.x === null ? "hidden" : "visible", x1: x, x2: x });
  }

  remove() {
    this.cursor.charts.delete(this);
    this.node.remove();
  }
}

function stack(ys) {
  let below = null;
  return ys.map((curve) => (below = below ? curve.map((value, at) => value + below[at]) : [...curve]));
}

function extent(curves) {
  let low = Infinity, high = -Infinity;
  for (const curve of curves) {
    for (const value of curve) {
      if (isMissing(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > high ? [0, 1] : [low, high];
}

// The last value up to a point; null if there is none.
function latest(curve, at) {
  while (at > 0 && isMissing(curve[at])) at--;
  return curve[at];
}

// Round numbers that enclose the values, at least `least` apart.
function niceTicks(low, high, parts, least) {
  if (high === low) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const raw = Math.max((high - low) / parts, least);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999 && !(least && each % least));
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

// Index of the nearest of the values, which need not rise.
function nearest(xs, x) {
  let best = 0, distance = Infinity;
  for (let at = 0; at < xs.length; at++) {
    const other = Math.abs(xs[at] - x);
    if (other <= distance) [best, distance] = [at, other];
  }
  return best;
}
