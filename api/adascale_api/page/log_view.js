// The output of the replicas of a job on this machine, which grows while they run.

import { element, setAttributes, setText } from "./dom.js";
import { get, getToken } from "./service.js";

const INTERVAL = 2000;
const MAX_TEXT = 400000;

export class LogView {
  constructor(job) {
    this.job = job;
    this.next = null;
    this.count = 0;
    this.abort = new AbortController();
    this.replica = element("select", { id: "log-replica", onchange: () => this.restart() });
    this.follows = element("input", { type: "checkbox", id: "log-follows", checked: true });
    this.message = element("p", { class: "muted" });
    this.text = element("pre", { tabindex: 0, class: "log" });
    this.controls = element("div", { class: "controls", hidden: true }, element("span", { class: "control" }, element("label", { for: "log-replica" }, "Replica"), this.replica), element("label", { class: "control" }, this.follows, "Show the newest line"));
    this.node = element("div", {}, this.controls, this.message);
    this.timer = setInterval(() => document.hidden || this.read(), INTERVAL);
    this.isReading = false;
    this.read();
  }

  setReplicas(count) {
    for (; this.count < count; this.count++) this.replica.append(element("option", { value: this.count }, `${this.count}`));
    this.controls.hidden = this.count === 0 || !getToken();
  }

  restart() {
    this.next = null;
    this.read();
  }

  async read() {
    if (!getToken()) return this.say("The output of the replicas is shown with a read token: use the button Read token.");
    if (this.isReading) return;
    this.isReading = true;
    const replica = Number(this.replica.value || 0);
    try {
      const path = `jobs/${encodeURIComponent(this.job)}/logs/${replica}`;
      const part = await get(this.next === null ? path : `${path}?after=${this.next}`, this.abort.signal);
      if (replica === Number(this.replica.value || 0)) this.show(part);
    } catch (error) {
      if (!this.abort.signal.aborted && error.status) this.say(error.message);
    } finally {
      this.isReading = false;
    }
  }

  show({ text, next, continues, missing }) {
    if (missing) return this.say(`${missing[0].toUpperCase()}${missing.slice(1)}.`);
    this.say("");
    if (!continues || this.next === null) this.text.replaceChildren();
    this.next = next;
    if (text) this.text.append(text);
    while (this.text.childNodes.length > 1 && this.text.textContent.length > MAX_TEXT) this.text.firstChild.remove();
    setAttributes(this.text, { "aria-label": `Output of replica ${this.replica.value || 0}` });
    if (this.follows.checked && text) this.text.scrollTop = this.text.scrollHeight;
  }

  say(message) {
    setText(this.message, message);
    this.message.hidden = !message;
    if (message) this.text.remove();
    else if (!this.text.isConnected) this.node.append(this.text);
  }

  close() {
    clearInterval(this.timer);
    this.abort.abort();
  }
}
