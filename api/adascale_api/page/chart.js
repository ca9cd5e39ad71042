// Line charts and stacked areas in SVG, with a cursor for the pointer and the arrow keys.

import { element, setAttributes, setText, svgElement } from "./dom.js";
import { isMissing } from "./format.js";
import { pngOf } from "./png.js";

const LEFT = 60, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 176;
const MAX_MARKS = 200;

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// What charts share: the position of the cursor, where `null` is the newest point, and the part of the axis that is
// shown, where `null` is all of it.
export class Cursor {
  constructor(onZoom = () => {}) {
    this.x = null;
    this.zoom = null;
    this.onZoom = onZoom;
    this.charts = new Set();
  }

  show(zoom) {
    this.zoom = zoom;
    for (const chart of this.charts) chart.draw();
    this.onZoom(zoom);
  }

  move(x) {
    this.x = x;
    for (const chart of this.charts) chart.drawCursor();
  }
}

// series: [{name, style}]; formatX(x, span) and formatY(y) return texts; isWhole: the values are integers; isTime: whether
// x is in seconds; canBeLog: whether the logarithm of the values may be shown.
export class Chart {
  constructor({ title, headingLevel = 3, series, formatX, formatY, isStacked = false, isStepped = false, isWhole = false, least = null, canBeLog = false, cursor = new Cursor() }) {
    Object.assign(this, { title, series, formatX, formatY, isStacked, isStepped, isWhole, least, canBeLog, cursor });
    this.isLog = false;
    this.isTime = true;
    this.dragged = null;
    this.xs = [];
    this.ys = [];
    this.marks = [];
    this.readout = element("span", { class: "readout" });
    this.drawing = svgElement("g");
    this.cursorLine = svgElement("line", { class: "cursor", visibility: "hidden", y1: TOP, y2: HEIGHT - BOTTOM });
    this.svg = svgElement("svg", { class: "chart", role: "slider", tabindex: 0, "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no data" }, this.drawing, this.cursorLine);
    this.legend = element("ul", { class: "legend" });
    this.node = element("figure", {}, element("figcaption", {}, element(`h${headingLevel}`, {}, title), this.readout, element("button", { type: "button", class: "png", "aria-label": `Download ${title} as PNG`, onclick: () => this.download() }, "PNG")), this.svg, this.legend);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && width !== this.width) {
        this.width = width;
        this.draw();
      }
    }).observe(this.svg);
    this.selection = svgElement("rect", { class: "selection", visibility: "hidden", y: TOP, height: HEIGHT - TOP - BOTTOM });
    this.svg.append(this.selection);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.beginDrag(event));
    this.svg.addEventListener("pointerup", (event) => this.endDrag(event));
    this.svg.addEventListener("pointercancel", () => this.cancelDrag());
    this.svg.addEventListener("dblclick", () => cursor.show(null));
    this.svg.addEventListener("pointerleave", () => cursor.move(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.svg.addEventListener("blur", () => cursor.move(null));
    cursor.charts.add(this);
    this.drawLegend();
  }

  // marks: [{x, isLoss}]; range: [first, last] of the axis, or null for that of the points; faint: curves that are drawn
  // behind, as the values before they were smoothed.
  setData(xs, ys, { marks = [], range = null, series = this.series, faint = [], isLog = false, isTime = true } = {}) {
    const isSame = series.length === this.series.length && series.every((each, at) => each.name === this.series[at].name);
    this.series = series;
    if (!isSame) this.drawLegend();
    const canBeLog = isLog && this.canBeLog && [...ys, ...faint].every((curve) => curve.every((y) => isMissing(y) || y > 0));
    Object.assign(this, { xs, ys, marks: marks.slice(-MAX_MARKS), range, faint, isLog: canBeLog, isTime });
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
    if (!this.width) return;
    const { xs } = this;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const curves = this.isStacked ? stack(this.ys) : this.ys;
    const all = this.range ?? extent([xs]);
    const [x0, x1] = this.cursor.zoom ?? all;
    let [y0, y1] = extent([...curves, ...(this.faint ?? [])].map((curve) => visible(xs, curve, x0, x1)));
    // Where nothing is shown, there are no values whose logarithm could be.
    const isLog = this.isLog && y0 > 0 && curves.some((curve) => visible(xs, curve, x0, x1).some((y) => !isMissing(y)));
    if (!isLog && (this.isStacked || this.least !== null)) y0 = Math.min(this.least ?? 0, y0);
    const ticks = isLog ? logTicks(y0, y1) : niceTicks(y0, y1, 4, this.isWhole ? 1 : 0);
    [y0, y1] = [Math.min(y0, ticks[0]), Math.max(y1, ticks.at(-1))];
    const place = isLog ? (y) => Math.log(y / y0) / Math.log(y1 / y0) : (y) => (y - y0) / (y1 - y0 || 1);
    const right = Math.max(this.width - RIGHT, LEFT + 1);
    this.toX = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (right - LEFT);
    this.toY = (y) => HEIGHT - BOTTOM - place(y) * (HEIGHT - BOTTOM - TOP);
    this.fromX = (px) => x0 + ((px - LEFT) / (right - LEFT)) * (x1 - x0);
    const parts = [];
    for (const tick of ticks) {
      const y = this.toY(tick).toFixed(1);
      parts.push(svgElement("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
      parts.push(svgElement("text", { class: "axis", x: LEFT - 6, y: Number(y) + 4, "text-anchor": "end" }, this.formatY(tick)));
    }
    // All points may have the same place, which has one label then; so have places with the same text.
    let before = null;
    const most = Math.max(2, Math.min(5, Math.floor((right - LEFT) / 90)));
    const places = !xs.length ? [] : x0 === x1 ? [x0] : placesBetween(x0, x1, most, this.isTime);
    for (const x of places) {
      const px = this.toX(x);
      const anchor = px < LEFT + 24 ? "start" : px > right - 24 ? "end" : "middle";
      const label = this.formatX(x, x1 - x0);
      if (label !== before) parts.push(svgElement("text", { class: "axis", x: px.toFixed(1), y: HEIGHT - 6, "text-anchor": anchor }, label));
      before = label;
    }
    // What is outside of the part that is shown is not drawn.
    const inside = svgElement("svg", { x: LEFT, y: 0, width: right - LEFT, height: HEIGHT, viewBox: `${LEFT} 0 ${right - LEFT} ${HEIGHT}` });
    for (const mark of this.marks) {
      if (mark.x < x0 || mark.x > x1) continue;
      const x = this.toX(mark.x).toFixed(1);
      parts.push(svgElement("line", { class: mark.isLoss ? "mark loss" : "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
      if (mark.isLoss) parts.push(svgElement("path", { class: "loss-sign", d: `M${x} ${TOP + 7}l-4-7h8z` }));
    }
    if (this.isStacked) {
      curves.forEach((curve, at) => inside.append(svgElement("path", { class: `area fill-${this.series[at].style}`, d: this.area(curve, at ? curves[at - 1] : null) })));
    } else {
      this.faint?.forEach((curve, at) => inside.append(svgElement("path", { class: `faint stroke-${this.series[at].style}`, d: this.line(curve) })));
      curves.forEach((curve, at) => inside.append(svgElement("path", { class: `curve stroke-${this.series[at].style}`, d: this.line(curve) })));
    }
    parts.push(inside);
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
    // Each value holds from its place to that of the next; the last one to the end of the axis.
    const place = (at) => this.toX(at < xs.length ? xs[at] : this.range?.[1] ?? xs.at(-1)).toFixed(1);
    let d = `M${place(0)} ${bottom.toFixed(1)}`;
    for (let at = 0; at < xs.length; at++) d += `V${this.toY(curve[at]).toFixed(1)}H${place(at + 1)}`;
    for (let at = xs.length - 1; at >= 0; at--) d += `V${this.toY(below ? below[at] : 0).toFixed(1)}H${place(at)}`;
    return `${d}Z`;
  }

  at(event) {
    return this.fromX(event.clientX - this.svg.getBoundingClientRect().left);
  }

  beginDrag(event) {
    this.point(event);
    if (event.button !== 0 || event.pointerType === "touch" || !this.xs.length) return;
    this.dragged = this.at(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  endDrag(event) {
    const from = this.dragged, to = this.xs.length ? this.at(event) : null;
    this.cancelDrag();
    if (from !== null && to !== null && Math.abs(this.toX(to) - this.toX(from)) > 8) this.cursor.show([Math.min(from, to), Math.max(from, to)]);
  }

  cancelDrag() {
    this.dragged = null;
    this.selection.setAttribute("visibility", "hidden");
  }

  // Shows the part around the cursor that is `factor` as long.
  scale(factor) {
    const [x0, x1] = this.cursor.zoom ?? this.range ?? extent([this.xs]);
    const all = this.range ?? extent([this.xs]);
    const center = this.cursor.x ?? (x0 + x1) / 2, half = (factor * (x1 - x0)) / 2;
    const zoom = [Math.max(center - half, all[0]), Math.min(center + half, all[1])];
    this.cursor.show(zoom[0] <= all[0] && zoom[1] >= all[1] ? null : zoom);
  }

  point(event) {
    if (!this.xs.length) return;
    const x = this.at(event);
    this.cursor.move(x);
    if (this.dragged === null) return;
    const [low, high] = [this.toX(Math.min(this.dragged, x)), this.toX(Math.max(this.dragged, x))];
    setAttributes(this.selection, { visibility: "visible", x: low.toFixed(1), width: (high - low).toFixed(1) });
  }

  press(event) {
    const last = this.xs.length - 1;
    if (last < 0) return;
    const at = this.cursor.x === null ? last : nearest(this.xs, this.cursor.x);
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -20, PageUp: 20, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") {
      this.cursor.move(null);
      return this.cursor.show(null);
    }
    if (event.key === "+" || event.key === "-") return this.scale(event.key === "+" ? 0.5 : 2);
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
    // The newest part of a stack is a mean over less than its interval, so it is not shown as the present number.
    const text = `${cursor.x === null ? "" : `${this.formatX(xs[at], 0)}: `}${named.join(", ")}`;
    setText(this.readout, this.isStacked && cursor.x === null ? "" : text);
    setAttributes(this.svg, { "aria-valuemax": xs.length - 1, "aria-valuenow": at, "aria-valuetext": `${this.formatX(xs[at], 0)}: ${named.join(", ")}` });
    const x = this.toX(xs[at]).toFixed(1);
    setAttributes(this.cursorLine, { visibility: cursor.x === null ? "hidden" : "visible", x1: x, x2: x });
  }

  // The chart as it is drawn now, without the cursor, on the background of the page.
  async download() {
    const blob = await pngOf(this.svg, this.title, [...this.series], this.series.length > 1);
    const link = element("a", { href: URL.createObjectURL(blob), download: `${this.title}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
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

// The values of a curve in a part of the axis; all of them if there are none.
function visible(xs, curve, x0, x1) {
  const found = curve.filter((_, at) => xs[at] >= x0 && xs[at] <= x1);
  return found.length ? found : curve;
}

// Round places on the axis, which are round times of day if it shows the time.
function placesBetween(x0, x1, most, isTime) {
  const span = x1 - x0;
  const raw = span / most;
  const step = (isTime && span > 2 && TIME_STEPS.find((each) => each >= raw)) || niceStep(raw, 0);
  const offset = isTime ? new Date(x0 * 1000).getTimezoneOffset() * 60 : 0;
  const places = [];
  for (let at = Math.ceil((x0 - offset) / step - 1e-9); at * step + offset <= x1 + 1e-9 * span; at++) places.push(at * step + offset);
  return places.length ? places : [x0];
}

// Powers of ten and their doubles and fives, of which at most six are labelled.
function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) ticks.push(Number((factor * 10 ** power).toPrecision(3)));
  }
  const first = ticks.findLastIndex((tick) => tick <= low * (1 + 1e-9)), last = ticks.findIndex((tick) => tick >= high * (1 - 1e-9));
  const shown = ticks.slice(Math.max(first, 0), Math.max(last, first + 1) + 1);
  const every = Math.ceil(shown.length / 6);
  return shown.filter((_, at) => at % every === 0 || at === shown.length - 1);
}

// The last value up to a point; null if there is none.
function latest(curve, at) {
  while (at > 0 && isMissing(curve[at])) at--;
  return curve[at];
}

// Round numbers that enclose the values, at least `least` apart.
function niceTicks(low, high, parts, least) {
  if (high === low) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const step = niceStep(Math.max((high - low) / parts, least), least);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

function niceStep(raw, least) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999 && !(least && each % least));
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
