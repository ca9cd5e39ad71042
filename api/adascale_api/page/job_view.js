// One job: its gain over time or progress, its generations, the decision, and its replicas.

import { Chart, Cursor } from "./chart.js";
import { element, howToStart, setText, table } from "./dom.js";
import { NONE, clock, count, duration, jobName, localBatch, percent, significant } from "./format.js";
import { LogView } from "./log_view.js";
import { ENDED, ServiceError, get, getToken } from "./service.js";

const POINTS = 1000;
const MAX_POINTS = 2000;
const READ_INTERVAL = 5000;
const MAX_SHOWN_GENERATIONS = 100;
const MAX_CAUSES = 8;

export const SMOOTHINGS = [["none", 0], ["0.9", 0.9], ["0.99", 0.99]];

export const CHARTS = [
  { title: "Gain and scale", series: [["gain", (each) => each.gain], ["scale", (each) => each.scale]], formatY: significant, least: 0 },
  { title: "Efficiency", series: [["efficiency", (each) => each.gain / each.scale]], formatY: percent, least: 0 },
  { title: "Replicas", series: [["replicas", (each) => each.replicas]], formatY: significant, isStepped: true, isWhole: true, least: 0 },
  { title: "Loss", series: [["loss", (each) => each.loss]], formatY: significant, isSmoothed: true, canBeLog: true },
  { title: "Learning rate", series: [["learning rate", (each) => each.lr]], formatY: significant, least: 0, canBeLog: true },
  { title: "Goodput (progress per second)", series: [["goodput", (each) => each.goodput]], formatY: significant, least: 0 },
  { title: "Step time", series: [["step", (each) => each.step_time || null], ["of it, gradient exchange", (each) => each.sync_time]], formatY: seconds, least: 0 },
  { title: "Samples per second", series: [["samples", (each) => (each.step_time > 0 ? (each.replicas * each.local_bsz * each.accumulation) / each.step_time : null)]], formatY: significant, least: 0 },
  { title: "Local batch (samples of a micro-batch)", series: [["local batch", (each) => each.local_bsz]], formatY: significant, isStepped: true, isWhole: true, least: 0 },
  { title: "Accumulation (micro-batches of a step)", series: [["micro-batches", (each) => each.accumulation]], formatY: significant, isStepped: true, isWhole: true, least: 0 },
  { title: "GPU of rank 0", series: [["use", (each) => each.gpu_use], ["memory", (each) => each.gpu_memory]], formatY: percent, least: 0, isOptional: true },
];

// A predicted gain, and between which it is at one standard error.
function between({ gain, gain_low: low, gain_high: high }) {
  const [least, most] = [significant(low), significant(high)];
  return least === most ? significant(gain) : `${significant(gain)} (${least} to ${most})`;
}

export class JobView {
  constructor(stream, id, options) {
    this.stream = stream;
    this.id = id;
    this.reports = [];
    this.generations = [];
    this.abort = new AbortController();
    this.byProgress = options.get("x") === "progress";
    this.state = element("span", { class: "state" }, "");
    this.notice = element("p", { class: "notice bad", role: "status", hidden: true });
    this.facts = ["Replicas", "Gain", "Efficiency", "Local batch", "Progress", "Time left", "Generation", "Disruptions", "Failures", "Age"].map((name) => ({ name, value: element("dd", {}, NONE) }));
    this.cursor = new Cursor((zoom) => (this.whole.hidden = zoom === null));
    this.smoothing = element("select", { id: "smoothing", onchange: () => this.draw() }, ...SMOOTHINGS.map(([name, value]) => element("option", { value }, name)));
    this.isLog = element("input", { type: "checkbox", id: "log-scale", onchange: () => this.draw() });
    this.whole = element("button", { type: "button", hidden: true, onclick: () => this.cursor.show(null) }, "Show all");
    this.download = element("button", { type: "button", onclick: () => this.downloadReports() }, "Download CSV");
    this.slow = element("p", { class: "notice", role: "status", hidden: true });
    this.result = element("p", { class: "notice", hidden: true });
    this.declaration = element("div");
    this.versions = element("div");
    this.log = new LogView(id);
    this.definitions = [];
    this.charts = [];
    this.chartList = element("div", { class: "charts" });
    for (const each of CHARTS) this.addChart(each);
    this.metrics = new Set();
    this.axis = element("fieldset", {}, element("legend", {}, "Over"), ...[["time", false], ["progress", true]].map(([name, byProgress]) => element(
      "label", {},
      element("input", { type: "radio", name: "axis", value: name, checked: this.byProgress === byProgress, onchange: () => this.setAxis(byProgress) }),
      name,
    )));
    this.copy = element("button", { type: "button", onclick: () => this.copyLink() }, "Copy link");
    this.decision = element("div");
    this.predictions = element("div");
    this.decided = null;
    this.hasCounts = false;
    this.job = null;
    this.wasSeen = false;
    this.createdAt = null;
    this.readings = this.lastReading = 0;
    this.goodput = new Chart({ title: "Replicas, by what they spend their time on", series: [], formatX: (x, span) => clock(x, { withSeconds: span < 600, withDate: span > 90000 }), formatY: significant, isStacked: true, least: 0 });
    this.useful = element("p");
    this.history = element("div");
    this.replicas = element("div");
    this.node = element(
      "div", {},
      element("p", {}, element("a", { href: "#/" }, "All jobs")),
      element("h1", {}, jobName(id)),
      element("p", {}, this.state),
      this.notice,
      this.slow,
      this.result,
      this.unknown = element("p", { hidden: true }, "There is no job ", element("strong", {}, jobName(id)), " here. ", element("a", { href: "#/" }, "All jobs"), " are in the list. ", ...howToStart()),
      this.content = element("div"),
    );
    this.content.append(
      element("dl", { class: "facts" }, ...this.facts.map(({ name, value }) => element("div", {}, element("dt", {}, name), value))),
      this.measurements = element(
        "div", {},
        element("h2", {}, "Measurements"),
        element("div", { class: "controls" }, this.axis, element("span", { class: "control" }, element("label", { for: "smoothing" }, "Smoothing of the loss and of logged values"), this.smoothing), element("label", { class: "control" }, this.isLog, "Logarithmic"), this.whole, this.copy, this.download),
        element("p", { class: "muted" }, "Dotted lines mark changes of the generation, solid lines with a triangle the loss of a replica or a failure. Drag to show a part, or use the keys + and -; Escape shows all. The arrow keys move the cursor of a chart."),
        this.chartList,
      ),
      this.present = element(
        "div", {},
        element("h2", {}, "Why it has this replica count"), this.decision,
        this.forecast = element("div", {}, element("h2", {}, "What other replica counts would give now"), this.predictions),
      ),
      element("h2", {}, "Where the time of its replicas went"), this.useful, this.goodput.node,
      element("h2", {}, "Generations"), this.history,
      element("h2", {}, "Replicas"), this.replicas,
      element("h2", {}, "Output"), this.log.node,
      element("h2", {}, "Declaration and versions"), this.declaration, this.versions,
    );
    this.timer = setInterval(() => document.hidden || !this.exists || this.readDetails(), READ_INTERVAL);
    this.update(stream.jobs, null);
  }

  // With very many jobs, the stream has the first of them only.
  get exists() {
    return this.stream.jobs.has(this.id) || this.stream.isTruncated;
  }

  addChart(definition) {
    const chart = new Chart({
      ...definition, cursor: this.cursor,
      series: definition.series.map(([name], at) => ({ name, style: at + 1 })),
      formatX: (x, span) => (this.byProgress ? count(x) : clock(x, { withSeconds: span < 600, withDate: span > 90000 })),
    });
    this.definitions.push(definition);
    this.charts.push(chart);
    this.chartList.append(chart.node);
  }

  // The program may begin to log a metric at any time.
  addChartsOfMetrics(reports) {
    const names = reports.flatMap((report) => Object.keys(report.metrics)).filter((name) => !this.metrics.has(name));
    for (const name of [...new Set(names)].sort()) {
      this.metrics.add(name);
      this.addChart({ title: name, series: [[name, (each) => each.metrics[name] ?? null]], formatY: significant, isSmoothed: true, canBeLog: true });
    }
  }

  title() {
    return `${jobName(this.id)} – AdaScale`;
  }

  update(jobs, changed) {
    if (changed && !changed.has(this.id)) return;
    const job = jobs.get(this.id);
    this.unknown.hidden = this.exists || !this.stream.isRead;
    this.content.hidden = !this.unknown.hidden;
    const isFirst = !this.wasSeen && this.exists;
    this.wasSeen = this.exists;
    if (isFirst) this.readDetails();
    if (!job) {
      if (isFirst) this.readHistory();
      return;
    }
    const { latest } = job;
    setText(this.state, job.state);
    this.state.dataset.state = job.state;
    const target = job.target === null ? "" : ` of ${count(job.target)} (${Math.floor(100 * Math.min((latest?.progress ?? 0) / job.target, 1))}%)`;
    const values = [
      `${job.desired === null || job.desired === job.replicas ? count(job.replicas) : `${count(job.replicas)} of ${count(job.desired)}`}${job.spares ? `, ${count(job.spares)} spare` : ""}`,
      latest ? `${significant(latest.gain)} at scale ${significant(latest.scale)}` : NONE,
      percent(latest ? latest.gain / latest.scale : null),
      latest ? localBatch(latest) : NONE,
      latest ? `${count(latest.progress)}${target}` : NONE,
      duration(job.seconds_left),
      count(job.generation), count(job.disruptions), count(job.failures),
      duration((this.endOf(job) ?? Date.now() / 1000) - job.created_at),
    ];
    this.job = job;
    this.showResult();
    this.showSlow();
    this.facts.forEach(({ value }, at) => setText(value, values[at]));
    const last = this.reports.at(-1);
    // Only the history has what came while this page was hidden or disconnected, and all reports of a new job of this name.
    const isNew = job.created_at !== this.createdAt;
    this.createdAt = job.created_at;
    if (!changed || isNew || (latest && !last)) this.readHistory();
    else if (latest && (latest.generation > last.generation || (latest.generation === last.generation && latest.step > last.step))) {
      this.reports.push(latest);
      this.addChartsOfMetrics([latest]);
      // Thinned, so that a page that stays open for days stays small.
      if (this.reports.length > MAX_POINTS) this.reports = this.reports.filter((_, at) => at % 2 || at > MAX_POINTS / 2);
      this.draw();
      if (latest.generation !== last.generation) this.readDetails();
    }
  }

  async readHistory() {
    const reading = ++this.readings;
    await this.attempt(async (signal) => {
      const history = await get(`jobs/${encodeURIComponent(this.id)}/gain/history?points=${POINTS}`, signal);
      if (reading < this.lastReading) return; // the answer to a later one was faster
      this.lastReading = reading;
      this.reports = history.points;
      this.addChartsOfMetrics(this.reports);
      this.draw();
    });
  }

  async readDetails() {
    const path = `jobs/${encodeURIComponent(this.id)}`;
    await this.attempt(async (signal) => {
      const [job, { generations, comparison, decided_at: decidedAt }, goodput] = await Promise.all([path, `${path}/generations`, `${path}/goodput`].map((each) => get(each, signal)));
      Object.assign(this, { generations, comparison });
      this.showResult();
      this.showDeclaration(job.spec);
      if (decidedAt === null || decidedAt !== this.decided) this.showDecision(decidedAt === null ? null : await get(`${path}/decision`, signal));
      this.showGoodput(goodput);
      this.showGenerations();
      this.showReplicas(job);
      this.draw();
      // Once the controller has decided, its own table of counts is the one to read.
      this.forecast.hidden = this.hasCounts;
      if (!this.hasCounts) this.showPredictions(job.latest ? await get(`${path}/gain`, signal) : null, job);
    });
  }

  async attempt(read) {
    try {
      await read(this.abort.signal);
      this.notice.hidden = true;
    } catch (error) {
      if (this.abort.signal.aborted || (error.status === 404 && !this.stream.jobs.has(this.id))) return;
      if (!(error instanceof ServiceError) && ENDED.includes(this.job?.state)) return; // the run is over
      this.notice.hidden = false;
      setText(this.notice, error instanceof ServiceError ? error.message : "The metrics service does not answer.");
    }
  }

  // When the last generation of a job that has ended was over.
  endOf(job) {
    return ENDED.includes(job.state) ? job.run?.ended_at ?? this.generations.at(-1)?.ended_at ?? job.latest?.time ?? null : null;
  }

  showResult() {
    const { job, generations, comparison } = this;
    if (!job) return;
    const { folder, versions } = job.run ?? {};
    const rows = [...(folder ? [["State folder", folder]] : []), ...Object.entries(versions ?? {}).map(([name, version]) => [`Version of ${name}`, version])];
    this.versions.replaceChildren(...(rows.length ? [table("Versions", [{ title: "Of the run", isText: true }, { title: "Value", isText: true }], rows)] : []));
    this.result.hidden = !ENDED.includes(job.state);
    this.present.hidden = !this.result.hidden;
    this.measurements.hidden = !this.result.hidden && !job.latest;
    if (this.result.hidden) return;
    const end = this.endOf(job);
    const began = generations[0]?.started_at ?? job.created_at;
    const sizes = generations.map((each) => each.replicas).filter((each) => each > 0);
    const least = Math.min(...sizes), most = Math.max(...sizes);
    const parts = [
      job.state,
      job.latest ? ` at progress ${count(job.latest.progress)}, in ${count(job.latest.step)} steps` : "",
      end === null ? "" : `, after ${duration(end - began)}`,
      sizes.length ? `, on ${least === most ? count(most) : `${count(least)} to ${count(most)}`} ${most === 1 ? "replica" : "replicas"}` : "",
      job.latest && job.latest.loss !== null ? `; the last loss was ${significant(job.latest.loss)}` : "", ".",
      job.run?.reason ? ` ${job.run.reason.replace(/\.?$/, ".")}` : "",
      comparison ? ` One replica would have made ${count(comparison.single_steps)} steps in an estimated ${comparison.single_seconds.map((each) => duration(each)).join(" to ")}.` : "",
      Object.keys(job.run?.result ?? {}).length ? ` The result is ${Object.entries(job.run.result).map(([name, value]) => `${name} ${typeof value === "number" ? significant(value, 4) : value}`).join(", ")}.` : "",
      job.state === "Failed" ? " The output of its last replica is below." : "",
    ];
    setText(this.result, parts.join(""));
  }

  // The replica for which the others wait, in the active generation.
  get slowReplica() {
    const { slowness, latest, generation } = this.job ?? {};
    return slowness && latest?.generation === generation ? latest.slow_replica : null;
  }

  showSlow() {
    const { slowness, latest } = this.job ?? {};
    this.slow.hidden = !slowness;
    if (!slowness) return setText(this.slow, "");
    const cause = this.slowReplica !== null && latest.nodes === 1 && latest.accelerator === "cpu" ? " On one machine the usual cause is that more processes compute than it has free cores." : "";
    setText(this.slow, `${slowness[0].toUpperCase()}${slowness.slice(1)}.${cause}`);
  }

  showDeclaration(spec) {
    if (!spec) return this.declaration.replaceChildren(element("p", { class: "muted" }, "The job has no declaration."));
    const rows = Object.entries(spec).filter(([, value]) => value !== null && value !== "").map(([name, value]) => [name, Array.isArray(value) ? value.join(" to ") : typeof value === "object" ? JSON.stringify(value) : String(value)]);
    this.declaration.replaceChildren(table("Declaration", [{ title: "Field", isText: true }, { title: "Value", isText: true }], rows));
  }

  downloadReports() {
    const metrics = [...this.metrics].sort();
    const fields = ["time", "generation", "step", "progress", "epoch", "replicas", "local_bsz", "accumulation", "scale", "gain", "grad_sqr", "grad_sqr_error", "grad_var", "step_time", "sync_time", "goodput", "lr", "lr_factor", "gpu_use", "gpu_memory", "slow_replica", "slow_factor", "loss"];
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const lines = [[...fields, ...metrics], ...this.reports.map((each) => [...fields.map((field) => each[field] ?? ""), ...metrics.map((name) => each.metrics[name] ?? "")])];
    const text = lines.map((line) => line.map((value) => quoted(String(value))).join(",")).join("\n") + "\n";
    const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${jobName(this.id)}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  setAxis(byProgress) {
    this.byProgress = byProgress;
    this.cursor.show(null);
    history.replaceState(null, "", this.link());
    this.draw();
  }

  link() {
    return `#/jobs/${encodeURIComponent(this.id)}${this.byProgress ? "?x=progress" : ""}`;
  }

  async copyLink() {
    try {
      await navigator.clipboard.writeText(new URL(this.link(), document.baseURI).href);
      setText(this.copy, "Copied");
    } catch {
      setText(this.copy, "Copy the address of this page");
    }
    setTimeout(() => setText(this.copy, "Copy link"), 2000);
  }

  draw() {
    const xs = this.reports.map((report) => (this.byProgress ? report.progress : report.time));
    const marks = this.marks();
    this.charts.forEach((chart, at) => {
      const { series, isSmoothed } = this.definitions[at];
      const measured = series.map(([, value]) => this.reports.map(value));
      const weight = isSmoothed ? Number(this.smoothing.value) : 0;
      const ys = weight ? measured.map((curve) => smoothed(curve, weight)) : measured;
      const options = { marks, faint: weight ? measured : [], isLog: this.isLog.checked, isTime: !this.byProgress };
      const isEmpty = ys.every((curve) => curve.every((y) => y === null || y === undefined));
      chart.node.hidden = isEmpty && Boolean(this.definitions[at].isOptional);
      chart.setData(isEmpty ? [] : xs, ys, options);
    });
  }

  // The beginnings of generations; over progress, at the first report of each.
  marks() {
    const marks = this.generations.slice(1).map(({ generation, cause, started_at }) => ({ generation, x: started_at, isLoss: cause === "disruption" || cause === "failure" }));
    if (!this.byProgress) return marks;
    const first = new Map();
    for (const report of this.reports) if (!first.has(report.generation)) first.set(report.generation, report.progress);
    return marks.filter(({ generation }) => first.has(generation)).map((mark) => ({ ...mark, x: first.get(mark.generation) }));
  }

  // The last decision as the controller has stored it.
  showDecision(decision) {
    this.decided = decision?.time ?? null;
    this.hasCounts = Boolean(decision?.counts.length);
    if (!decision) {
      this.decision.replaceChildren(element("p", { class: "muted" }, "No decision about this job is stored: a controller stores one soon after the start."));
      return;
    }
    const now = decision.counts.find((each) => each.replicas === decision.present);
    const outcome = decision.waiting ? "It waits for capacity" : decision.replicas ? `${count(decision.replicas)} ${decision.replicas === 1 ? "replica" : "replicas"}` : "It does not run";
    const columns = ["Replicas", "Gain", "Goodput", "Relative", "Time left", "Others would give", "Reason"].map((title, at) => ({ title, isText: at === 5, isLong: at === 6, isMinor: at === 3 }));
    const rows = decision.counts.map((each) => [
      count(each.replicas), between(each), significant(each.goodput), now?.goodput && each.goodput !== null ? `${significant(each.goodput / now.goodput)}×` : NONE, duration(each.seconds_left),
      each.given.length ? each.given.map(({ job, replicas }) => `${count(replicas)} of ${job}`).join(", ") : NONE,
      each.reason,
    ]);
    const parts = [element("p", {}, element("strong", {}, outcome), `, decided ${clock(decision.time, { withDate: true })}: ${decision.reason}.`)];
    if (decision.limits.length) parts.push(element("p", {}, "What limits the count:"), element("ul", { class: "limits" }, ...decision.limits.map(({ reason }) => element("li", {}, reason))));
    if (rows.length) parts.push(table("Counts in the decision", columns, rows, (at) => decision.counts[at].verdict === "chosen"));
    this.decision.replaceChildren(...parts);
  }

  showPredictions(gain, job) {
    if (!gain?.predictions) {
      this.predictions.replaceChildren(element("p", { class: "muted" }, "Predictions need the declaration of the job and a measured step time."));
      return;
    }
    const { predictions } = gain;
    const best = predictions.reduce((most, each) => Math.max(most, each.goodput), 0);
    const now = predictions.find((each) => each.replicas === gain.replicas);
    const rows = predictions.map((each) => [
      count(each.replicas), localBatch(each), significant(each.scale), between(each),
      percent(each.efficiency), significant(each.goodput), now ? `${significant(each.goodput / now.goodput)}×` : NONE,
    ]);
    const columns = ["Replicas", "Local batch", "Scale", "Gain", "Efficiency", "Goodput", "Relative to now"].map((title, at) => ({ title, isMinor: at === 1 || at === 2 }));
    const most = predictions.find((each) => each.goodput === best);
    const text = `It trains on ${count(gain.replicas)}. ${count(most.replicas)} would give the highest goodput; the controller also counts the interruption by a change, and the other jobs. Allowed are ${count(job.spec.min_replicas)} to ${count(job.spec.max_replicas)}.`;
    this.predictions.replaceChildren(element("p", {}, text), table("Predictions for other replica counts", columns, rows, (at) => predictions[at].replicas === gain.replicas));
  }

  // The mean number of replicas between two points of the history; causes with little time together.
  showGoodput({ replica_seconds: totals, useful_ratio: ratio, history }) {
    const total = Object.values(totals).reduce((sum, each) => sum + each, 0);
    setText(this.useful, total ? `${duration(total)} of replica time, of which ${percent(ratio)} were useful.` : "No replica has reported its time yet.");
    const causes = Object.keys(totals).filter((cause) => totals[cause] > 0).sort((one, other) => totals[other] - totals[one]);
    const shown = Object.keys(totals).filter((cause) => causes.slice(0, MAX_CAUSES).includes(cause));
    const groups = [...shown.map((cause) => [cause]), ...(causes.length > MAX_CAUSES ? [causes.slice(MAX_CAUSES)] : [])];
    const secondsOf = (point, group) => group.reduce((sum, cause) => sum + point.replica_seconds[cause], 0);
    const later = history.slice(1);
    const rates = groups.map((group) => later.map((point, at) => Math.max(0, secondsOf(point, group) - secondsOf(history[at], group)) / (point.time - history[at].time)));
    const series = groups.map((group, at) => ({ name: group.length > 1 || at === MAX_CAUSES ? "others" : group[0].replace("_", " "), style: at + 1 }));
    this.goodput.node.hidden = !later.length;
    this.goodput.setData(later.map((point) => point.time), rates, { series });
  }

  showGenerations() {
    const shown = this.generations.slice(-MAX_SHOWN_GENERATIONS).reverse();
    if (!shown.length) return this.history.replaceChildren(element("p", { class: "muted" }, "No generation was active yet."));
    const columns = ["Generation", "Replicas", "Began", "Lasted", "Downtime before", "Because"].map((title, at) => ({ title, isText: at === 5, isMinor: at === 4 }));
    const rows = shown.map((each) => [
      count(each.generation), count(each.replicas), clock(each.started_at, { withDate: true }),
      each.ended_at === null ? "active" : duration(each.ended_at - each.started_at),
      each.downtime === null ? NONE : `${each.downtime.toFixed(1)} s`, each.reason,
    ]);
    this.history.replaceChildren(table("Generations", columns, rows, (at) => shown[at].ended_at === null));
  }

  showReplicas(job) {
    const most = Math.max(0, ...this.generations.map((each) => each.replicas), ...job.replicas.map((each) => each.replica + 1));
    this.log.setReplicas(most);
    if (!job.replicas.length) return this.replicas.replaceChildren(element("p", { class: "muted" }, "No replica is registered."));
    const columns = ["Replica", "State", "Generation", "How it ended", "Heartbeat"].map((title, at) => ({ title, isText: at === 1 || at === 3 }));
    const rows = job.replicas.map((each) => [
      count(each.replica), each.replica === this.slowReplica ? `${each.state}, slow` : each.state, count(each.generation), each.end || NONE,
      each.seconds_since_heartbeat === null ? NONE : `${duration(each.seconds_since_heartbeat)} ago`,
    ]);
    const open = new Set([...this.replicas.querySelectorAll("details[open]")].map((node) => node.dataset.replica));
    const logs = job.replicas.filter((each) => each.log).map((each) => element(
      "details", { "data-replica": each.replica, open: open.size === 0 || open.has(String(each.replica)) },
      element("summary", {}, `Output of replica ${each.replica}${each.end ? `, which ${each.end}` : ""}`),
      element("pre", { tabindex: 0, "aria-label": `Output of replica ${each.replica}` }, each.log),
    ));
    // Without a token that may read them, logs are empty texts instead of null.
    const isHidden = !getToken() && job.replicas.some((each) => each.log === "");
    this.replicas.replaceChildren(
      table("Replicas", columns, rows),
      ...logs,
      ...(isHidden ? [element("p", { class: "notice" }, "The output of failed replicas is shown with a read token: use the button Read token.")] : []),
    );
  }

  close() {
    clearInterval(this.timer);
    this.log.close();
    this.abort.abort();
    for (const chart of [...this.charts, this.goodput]) chart.remove();
  }
}

export function seconds(value) {
  return value === null || value === undefined ? NONE : value < 1 ? `${significant(1000 * value)} ms` : `${significant(value)} s`;
}

// The moving average of the values that were measured, without a pull towards 0 at the beginning.
export function smoothed(curve, weight) {
  let sum = 0, weights = 0;
  return curve.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}
