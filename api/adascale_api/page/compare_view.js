// Several jobs or runs over each other, by progress or by the time since each began.

import { Chart, Cursor } from "./chart.js";
import { element, howToStart, table } from "./dom.js";
import { NONE, count, duration, jobName, percent, significant } from "./format.js";
import { CHARTS, SMOOTHINGS, smoothed } from "./job_view.js";
import { ENDED, get } from "./service.js";

const POINTS = 1000;
const READ_INTERVAL = 5000;
const MAX_RUNS = 8;
const AXES = [["progress", true], ["time since the start", false]];

export class CompareView {
  constructor(stream, options) {
    this.stream = stream;
    this.ids = [...new Set((options.get("jobs") ?? "").split(" ").filter(Boolean))].slice(0, MAX_RUNS);
    this.byProgress = options.get("x") !== "time";
    this.reports = new Map();
    this.abort = new AbortController();
    this.cursor = new Cursor((zoom) => (this.whole.hidden = zoom === null));
    this.whole = element("button", { type: "button", hidden: true, onclick: () => this.cursor.show(null) }, "Show all");
    this.smoothing = element("select", { id: "smoothing", onchange: () => this.draw() }, ...SMOOTHINGS.map(([name, value]) => element("option", { value }, name)));
    this.isLog = element("input", { type: "checkbox", id: "log-scale", onchange: () => this.draw() });
    this.axis = element("fieldset", {}, element("legend", {}, "Over"), ...AXES.map(([name, byProgress]) => element(
      "label", {}, element("input", { type: "radio", name: "axis", value: name, checked: this.byProgress === byProgress, onchange: () => this.setAxis(byProgress) }), name,
    )));
    this.summary = element("div");
    this.charts = new Map();
    this.chartList = element("div", { class: "charts" });
    this.node = element(
      "div", {},
      element("p", {}, element("a", { href: "#/" }, "All jobs")),
      element("h1", {}, `Comparison of ${count(this.ids.length)} jobs`),
      ...(this.ids.length < 2
        ? [element("p", {}, "Mark two or more jobs in the ", element("a", { href: "#/" }, "list of all jobs"), ", and press Compare. ", ...howToStart())]
        : [
          this.summary,
          element("div", { class: "controls" }, this.axis, element("span", { class: "control" }, element("label", { for: "smoothing" }, "Smoothing of the loss and of logged values"), this.smoothing), element("label", { class: "control" }, this.isLog, "Logarithmic"), this.whole),
          this.chartList,
        ]),
    );
    for (const each of CHARTS) for (const [name, value] of each.series) this.addChart({ ...each, title: each.series.length > 1 ? `${each.title}: ${name}` : each.title, value });
    this.timer = setInterval(() => document.hidden || this.read(), READ_INTERVAL);
    this.update(stream.jobs, null);
    this.read(true);
  }

  // Names that are the same have the end of their folder too.
  nameOf(id) {
    const isAlone = this.ids.filter((each) => jobName(each) === jobName(id)).length === 1;
    const folder = this.stream.jobs.get(id)?.run?.folder;
    return isAlone ? jobName(id) : `${jobName(id)} (${folder ? folder.split("/").slice(-3).join("/") : id})`;
  }

  addChart(definition) {
    const chart = new Chart({
      ...definition, headingLevel: 2, cursor: this.cursor, series: this.ids.map((id, at) => ({ name: this.nameOf(id), style: at + 1 })),
      formatX: (x) => (this.byProgress ? count(x) : duration(x)),
    });
    this.charts.set(definition.title, { chart, definition });
    this.chartList.append(chart.node);
  }

  title() {
    return "Comparison – AdaScale";
  }

  update(jobs, changed) {
    if (changed && !this.ids.some((id) => changed.has(id))) return;
    const rows = this.ids.map((id) => {
      const job = jobs.get(id), { latest } = job ?? {};
      return [
        element("a", { href: `#/jobs/${encodeURIComponent(id)}` }, this.nameOf(id)), job?.state ?? "unknown", latest ? count(latest.progress) : NONE, latest ? count(latest.step) : NONE,
        latest ? percent(latest.gain / latest.scale) : NONE, significant(latest?.loss), job?.run?.folder ?? NONE,
      ];
    });
    const columns = ["Job", "State", "Progress", "Steps", "Efficiency", "Loss", "State folder"].map((title, at) => ({ title, isText: at === 1 || at === 6, isMinor: at > 3 }));
    this.summary.replaceChildren(table("Compared jobs", columns, rows));
  }

  async read(isFirst = false) {
    if (this.ids.length < 2) return;
    await Promise.all(this.ids.map(async (id) => {
      if (!isFirst && ENDED.includes(this.stream.jobs.get(id)?.state) && this.reports.has(id)) return;
      try {
        const { points } = await get(`jobs/${encodeURIComponent(id)}/gain/history?points=${POINTS}`, this.abort.signal);
        this.reports.set(id, points);
      } catch {
        // The table shows that it is unknown, and the status of the stream that the service does not answer.
      }
    }));
    if (!this.abort.signal.aborted) this.draw();
  }

  setAxis(byProgress) {
    this.byProgress = byProgress;
    this.cursor.show(null);
    history.replaceState(null, "", `#/compare?${new URLSearchParams({ jobs: this.ids.join(" "), x: byProgress ? "progress" : "time" })}`);
    this.draw();
  }

  draw() {
    const runs = this.ids.map((id) => this.reports.get(id) ?? []);
    for (const name of new Set(runs.flatMap((points) => points.flatMap((each) => Object.keys(each.metrics))))) {
      if (!this.charts.has(name)) this.addChart({ title: name, value: (each) => each.metrics[name] ?? null, formatY: significant, isSmoothed: true, canBeLog: true });
    }
    const places = runs.map((points) => points.map((each) => (this.byProgress ? each.progress : each.time - points[0].time)));
    const xs = [...new Set(places.flat())].sort((a, b) => a - b);
    const indices = new Map(xs.map((x, at) => [x, at]));
    const series = this.ids.map((id, at) => ({ name: this.nameOf(id), style: at + 1 }));
    for (const { chart, definition } of this.charts.values()) {
      const weight = definition.isSmoothed ? Number(this.smoothing.value) : 0;
      const ys = runs.map((points, run) => {
        const values = points.map(definition.value);
        const curve = new Array(xs.length).fill(null);
        (weight ? smoothed(values, weight) : values).forEach((y, at) => (curve[indices.get(places[run][at])] = y ?? null));
        return curve;
      });
      const isEmpty = ys.every((curve) => curve.every((y) => y === null));
      chart.node.hidden = isEmpty;
      chart.setData(isEmpty ? [] : xs, ys, { series, isLog: this.isLog.checked, isTime: false });
    }
  }

  close() {
    clearInterval(this.timer);
    this.abort.abort();
    for (const { chart } of this.charts.values()) chart.remove();
  }
}
