// Calls the metrics service, with the read token of this tab if there is one.

const TOKEN = "adascale-read-token";
const MAX_DELAY = 15000;
const TIMEOUT = 15000;
// The service sends a comment after 15 s without a change.
const MAX_SILENCE = 40000;

export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function getToken() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

// Returns the JSON of a GET. Paths are relative to the page, so the page works behind a proxy too.
export async function get(path, signal = new AbortController().signal) {
  const answer = await request(path, AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT)]));
  return answer.json();
}

async function request(path, signal) {
  const token = getToken();
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal, cache: "no-store" });
  if (answer.ok) return answer;
  let message = answer.statusText;
  try {
    message = (await answer.json()).error;
  } catch {
    // another server's answer
  }
  throw new ServiceError(message, answer.status);
}

// Follows the summaries of all jobs. The browser's EventSource cannot send a token, so the stream is read by fetch.
export class JobStream {
  constructor({ onJobs, onStatus }) {
    this.onJobs = onJobs;
    this.onStatus = onStatus;
    this.jobs = new Map();
    this.isTruncated = false;
    this.isRead = false;
    this.lastAnswer = null;
    this.abort = null;
  }

  start() {
    if (this.abort === null) this.run((this.abort = new AbortController()).signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  async run(signal) {
    let delay = 1000;
    while (!signal.aborted) {
      // A connection that is lost without a word ends too.
      const connection = new AbortController();
      let silence = 0;
      const heard = () => {
        clearTimeout(silence);
        silence = setTimeout(() => connection.abort(), MAX_SILENCE);
      };
      try {
        heard();
        const answer = await request("events", AbortSignal.any([signal, connection.signal]));
        delay = 1000;
        await this.read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), heard);
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error.status === 401 || error.status === 403;
        this.onStatus(isRefused ? "refused" : "lost", error instanceof ServiceError ? error.message : "The metrics service does not answer.");
        if (isRefused) return this.stop();
      } finally {
        clearTimeout(silence);
      }
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(delay * 2, MAX_DELAY);
    }
  }

  async read(reader, heard) {
    let parts = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      this.lastAnswer = Date.now() / 1000;
      if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length)) {
        parts.push(value);
        continue;
      }
      const events = (parts.join("") + value).split("\n\n");
      parts = [events.pop()];
      for (const event of events) this.handle(event);
    }
  }

  handle(event) {
    const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
    if (!fields.data) return;
    const data = JSON.parse(fields.data);
    if (fields.event === "problem") {
      // An empty text: the jobs can be read again.
      this.onStatus(data ? "lost" : "live", data);
      return;
    }
    const isFirst = fields.event === "all";
    if (isFirst) this.jobs = new Map();
    this.isRead = true;
    for (const job of data.jobs) this.jobs.set(job.id, job);
    for (const id of data.deleted) this.jobs.delete(id);
    this.isTruncated = data.truncated;
    this.onStatus("live", "");
    this.onJobs(this.jobs, isFirst ? null : new Set([...data.jobs.map((job) => job.id), ...data.deleted]));
  }
}
