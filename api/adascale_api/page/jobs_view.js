// All jobs, and the use of the cluster.

import { Chart } from "./chart.js";
import { element, howToStart, setAttributes, setText } from "./dom.js";
import { NONE, clock, count, duration, jobName, localBatch, percent, significant } from "./format.js";
import { get } from "./service.js";

const STATES = ["Failed", "Recovering", "Rescaling", "Starting", "Running", "Stopping", "Pending", "Suspended", "Stopped", "Unknown", "Complete"];
// The counts above the chart, and the states of their jobs. After the first, each state is in one of them.
const TALLIES = {
  Jobs: STATES, Training: ["Running", "Rescaling", "Recovering", "Stopping"], Starting: ["Starting"], Pending: ["Pending"],
  Stopped: ["Suspended", "Stopped", "Unknown"], Failed: ["Failed"], Complete: ["Complete"],
};
const USAGE_INTERVAL = 15000;
// What the use is grouped by, with the singular and plural of those that are summed.
const GROUPS = { job: ["job", "jobs"], namespace: ["namespace", "namespaces"] };
const RANGES = [["10 minutes", 600], ["1 hour", 3600], ["6 hours", 21600], ["1 day", 86400], ["7 days", 604800]];

const share = (job) => (job.latest && job.target ? Math.min(job.latest.progress / job.target, 1) : null);
const began = (job) => job.run?.began_at ?? job.created_at;
const pending = (job) => (job.state === "Pending" ? Date.now() / 1000 - job.created_at : null);

// `value` sorts; `show` is the text.
const COLUMNS = [
  { key: "name", title: "Job", value: (job) => job.id, show: (job) => jobName(job.id), isText: true },
  { key: "state", title: "State", value: (job) => STATES.indexOf(job.state), show: (job) => job.state, isText: true },
  { key: "replicas", title: "Replicas", value: (job) => job.replicas, show: (job) => (job.desired === null || job.desired === job.replicas ? `${job.replicas}` : `${job.replicas} of ${job.desired}`) },
  { key: "batch", title: "Local batch", value: (job) => job.latest?.local_bsz, show: (job) => (job.latest ? localBatch(job.latest) : NONE), isOfCluster: true, isMinor: true },
  { key: "gain", title: "Gain", value: (job) => job.latest?.gain, show: (job) => significant(job.latest?.gain), isMinor: true },
  { key: "efficiency", title: "Efficiency", value: (job) => efficiency(job), show: (job) => percent(efficiency(job)), isOfCluster: true, isMinor: true },
  { key: "progress", title: "Progress", value: (job) => share(job) ?? job.latest?.progress, show: (job) => (share(job) === null ? (job.latest ? count(job.latest.progress) : NONE) : `${Math.floor(100 * share(job))}%`) },
  { key: "loss", title: "Loss", value: (job) => job.latest?.loss, show: (job) => significant(job.latest?.loss), isMinor: true },
  { key: "left", title: "Time left", value: (job) => job.seconds_left, show: (job) => duration(job.seconds_left) },
  { key: "began", title: "Began", value: began, show: (job) => clock(began(job), { withSeconds: false, withDate: true }), isMinor: true },
  { key: "pending", title: "Pending for", value: pending, show: (job) => duration(pending(job)), isOfCluster: true, isMinor: true },
  { key: "folder", title: "Folder", value: (job) => job.run?.folder, show: (job) => job.run?.folder.replace(/\/\.adascale\/[^/]*$/, "") ?? NONE, isText: true, isLong: true, isOfRuns: true, isMinor: true },
  { key: "reason", title: "Reason", value: (job) => job.run?.reason, show: (job) => shortened(job.run?.reason ?? ""), isText: true, isLong: true, isOfRuns: true, isMinor: true },
];
const MAX_REASON = 80;
const MAX_COMPARED = 8;

function shortened(text) {
  return text.length > MAX_REASON ? `${text.slice(0, MAX_REASON - 1)}…` : text;
}

function efficiency(job) {
  return job.latest ? job.latest.gain / job.latest.scale : null;
}

export class JobsView {
  constructor(stream) {
    this.stream = stream;
    this.rows = new Map();
    this.sort = { column: COLUMNS.find(({ key }) => key === "began"), isDescending: true };
    this.facts = ["Replicas in use", ...Object.keys(TALLIES)].map((name) => ({ name, value: element("dd", {}, NONE) }));
    this.filter = element("input", { id: "filter", type: "search", autocomplete: "off", oninput: () => this.arrange() });
    this.state = element("select", { id: "state", onchange: () => this.arrange() }, element("option", { value: "" }, "All"), ...STATES.map((state) => element("option", {}, state)));
    this.range = element("select", { id: "range", onchange: () => this.readUsage() }, ...RANGES.map(([name, seconds]) => element("option", { value: seconds, selected: seconds === 3600 }, name)));
    this.group = element("select", { id: "group", onchange: () => this.chooseGroup() }, ...Object.keys(GROUPS).map((group) => element("option", { value: group }, group)));
    this.isGroupChosen = false;
    this.shown = element("span", { class: "muted", role: "status" });
    this.body = element("tbody");
    this.compare = element("button", { type: "button", disabled: true, onclick: () => this.openComparison() }, "Compare");
    this.heads = COLUMNS.map((column) => element("th", { scope: "col", class: classes(column) }, element("button", { type: "button", onclick: () => this.sortBy(column) }, column.title)));
    this.usage = new Chart({
      title: "Replicas in use", headingLevel: 2, series: [], isStacked: true, isStepped: true, isWhole: true, least: 0,
      formatX: (x, span) => clock(x, { withSeconds: span < 600, withDate: span > 90000 }), formatY: (y) => significant(y),
    });
    this.shownTime = element("span", { class: "muted" });
    this.none = element("p", { hidden: true }, "There are no jobs yet. ", ...howToStart());
    this.node = element(
      "div", {},
      element("h1", {}, "Jobs"),
      element("dl", { class: "facts" }, ...this.facts.map(({ name, value }) => element("div", {}, element("dt", {}, name), value))),
      element("div", { class: "controls" }, labelled("Time shown", this.range), labelled("By", this.group), this.shownTime),
      this.usage.node,
      element("h2", {}, "All jobs"),
      this.none,
      element("div", { class: "controls" }, labelled("Name contains", this.filter), labelled("State", this.state), this.compare, this.shown),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All jobs" }, this.table = element("table", { class: "no-runs" }, element("thead", {}, element("tr", {}, ...this.heads)), this.body)),
    );
    this.timer = setInterval(() => document.hidden || this.readUsage(), USAGE_INTERVAL);
    this.readUsage();
    this.update(stream.jobs, null);
  }

  title() {
    return "AdaScale jobs";
  }

  // `changed`: the ids of the jobs that have changed; null if all have.
  update(jobs, changed) {
    for (const id of changed ?? new Set([...jobs.keys(), ...this.rows.keys()])) {
      const job = jobs.get(id);
      if (job) this.updateRow(job);
      else this.rows.delete(id);
    }
    const all = [...jobs.values()];
    const values = [total(all.map((job) => job.replicas)), ...Object.values(TALLIES).map((states) => all.filter((job) => states.includes(job.state)).length)];
    this.facts.forEach(({ value }, at) => setText(value, count(values[at])));
    // State folders are those of runs on one machine.
    this.table.classList.toggle("no-runs", !all.some((job) => job.run));
    this.none.hidden = !this.stream.isRead || all.length > 0;
    this.arrange();
  }

  updateRow(job) {
    let row = this.rows.get(job.id);
    if (!row) {
      const link = element("a", { href: `#/jobs/${encodeURIComponent(job.id)}` });
      const texts = COLUMNS.map(() => element("span"));
      const bar = element("progress", { max: 1, "aria-label": `Progress of ${job.id}` });
      texts[1].className = "state";
      link.append(texts[0]);
      const chosen = element("input", { type: "checkbox", "aria-label": `Compare ${jobName(job.id)}`, onchange: () => this.showComparison() });
      const cells = COLUMNS.map((column, at) => element(at ? "td" : "th", { scope: at ? null : "row", class: classes(column) }, ...(at === 0 ? [chosen, link] : column.key === "progress" ? [bar, texts[at]] : [texts[at]])));
      row = { node: element("tr", { "data-job": job.id }, ...cells), texts, bar, chosen };
      this.rows.set(job.id, row);
    }
    row.job = job;
    COLUMNS.forEach((column, at) => setText(row.texts[at], column.show(job)));
    row.texts[1].dataset.state = job.state;
    const progress = share(job);
    row.bar.hidden = progress === null;
    if (progress !== null) row.bar.value = progress;
  }

  get compared() {
    return [...this.rows.values()].filter(({ chosen }) => chosen.checked).map(({ job }) => job.id);
  }

  showComparison() {
    const { length } = this.compared;
    this.compare.disabled = length < 2 || length > MAX_COMPARED;
    setText(this.compare, length < 2 ? "Compare" : length > MAX_COMPARED ? `Compare at most ${MAX_COMPARED}` : `Compare ${length} jobs`);
  }

  openComparison() {
    location.hash = `#/compare?${new URLSearchParams({ jobs: this.compared.join(" "), x: "progress" })}`;
  }

  sortBy(column) {
    this.sort = { column, isDescending: this.sort.column === column && !this.sort.isDescending };
    this.arrange();
  }

  arrange() {
    const { column, isDescending } = this.sort;
    this.heads.forEach((head, at) => setAttributes(head, { "aria-sort": COLUMNS[at] === column ? (isDescending ? "descending" : "ascending") : null }));
    const text = this.filter.value.trim().toLowerCase(), state = this.state.value;
    const rows = [...this.rows.values()].filter(({ job }) => (!state || job.state === state) && job.id.includes(text));
    const direction = isDescending ? -1 : 1;
    rows.sort((a, b) => direction * compare(column.value(a.job), column.value(b.job)) || compare(a.job.id, b.job.id));
    // Only rows that are at another place are moved, so the focus stays.
    let place = this.body.firstChild;
    const kept = new Set(rows);
    for (const child of [...this.body.children]) {
      if (!kept.has(this.rowOf(child))) {
        if (child === place) place = child.nextSibling;
        child.remove();
      }
    }
    for (const { node } of rows) {
      if (node === place) place = place.nextSibling;
      else this.body.insertBefore(node, place);
    }
    const all = this.stream.isTruncated ? `the first ${count(this.rows.size)}` : count(this.rows.size);
    setText(this.shown, rows.length === this.rows.size && !this.stream.isTruncated ? "" : `${count(rows.length)} of ${all} shown`);
  }

  rowOf(node) {
    const row = this.rows.get(node.dataset.job);
    return row?.node === node ? row : undefined;
  }

  chooseGroup() {
    this.isGroupChosen = true;
    this.readUsage();
  }

  async readUsage() {
    try {
      const seconds = Number(this.range.value);
      const usage = await this.usageOfGroups(seconds);
      const xs = usage.others.map((_, at) => usage.start + at * usage.interval);
      const series = usage.largest.map(({ name }, at) => ({ name: jobName(name), style: at + 1 }));
      const ys = usage.largest.map(({ replicas }) => replicas);
      if (usage.other_count) {
        series.push({ name: `${count(usage.other_count)} other ${GROUPS[this.group.value][usage.other_count > 1 ? 1 : 0]}`, style: 9 });
        ys.push(usage.others);
      }
      // From the first use on: a service that has just started has used nothing before.
      const first = Math.max(xs.findIndex((_, at) => ys.some((curve) => curve[at] > 0)) - 1, 0);
      this.usage.setData(ys.length ? xs.slice(first) : [], ys.map((curve) => curve.slice(first)), { series, range: [usage.start + first * usage.interval, usage.start + seconds] });
      const since = first > 0 && ys.length ? `From ${clock(xs[first], { withDate: seconds > 86400 })}, when the first of these replicas began. ` : "";
      setText(this.shownTime, ys.length ? `${since}Each step is the mean of ${duration(usage.interval)}.` : "");
    } catch {
      // The status of the stream shows that the service does not answer.
    }
  }

  // The first time, by namespace if most replicas are of jobs that would have no color of their own.
  async usageOfGroups(seconds) {
    const read = (by) => get(`usage?seconds=${seconds}&points=240&by=${by}`);
    const usage = await read(this.group.value);
    if (this.isGroupChosen || !total(usage.largest.map(({ replicas }) => total(replicas)))) return usage;
    this.isGroupChosen = true;
    if (total(usage.others) < total(usage.largest.map(({ replicas }) => total(replicas)))) return usage;
    const byNamespace = await read("namespace");
    if (byNamespace.largest.length < 2) return usage;
    this.group.value = "namespace";
    return byNamespace;
  }

  close() {
    clearInterval(this.timer);
    this.usage.remove();
  }
}

function labelled(text, control) {
  return element("span", { class: "control" }, element("label", { for: control.id }, text), control);
}

function total(values) {
  return values.reduce((sum, value) => sum + value, 0);
}

function classes(column) {
  return [column.isText && "text", column.isLong && "long", column.isMinor && "minor", column.isOfRuns && "of-run", column.isOfCluster && "of-cluster"].filter(Boolean).join(" ") || null;
}

function compare(a, b) {
  const isMissing = (value) => value === null || value === undefined;
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  return a < b ? -1 : a > b ? 1 : 0;
}
