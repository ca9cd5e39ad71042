// Calls the metrics service, with the read token of this tab if there is one.

const TOKEN = "adascale-read-token";
const MAX_DELAY = 15000;
const TIMEOUT = 15000;

export const ENDED = ["Complete", "Failed", "Stopped"];

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

async function request(path, signal, headers = {}) {
  const token = getToken();
  const answer = await fetch(path, { headers: token ? { Authorization: `Bearer ${token}`, ...headers } : headers, signal, cache: "no-store" });
  if (answer.ok || answer.status === 304) return answer;
  let message = answer.statusText;
  try {
    message = (await answer.json()).error;
  } catch {
    // another server's answer
  }
  throw new ServiceError(message, answer.status);
}

// Follows the summaries of all jobs: asks for them again and again, and gets them if they have changed.
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

  // Whether there are jobs, and all have ended.
  get haveEnded() {
    return this.jobs.size > 0 && [...this.jobs.values()].every((job) => ENDED.includes(job.state));
  }

  start() {
    if (this.abort === null) this.run((this.abort = new AbortController()).signal);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  async run(signal) {
    let delay = 0;
    let interval = 2000;
    let etag = null; // of the jobs that the page has; null if it may have missed changes
    while (!signal.aborted) {
      try {
        const answer = await request("summaries", AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT)]), etag ? { "If-None-Match": etag } : {});
        if (answer.status === 200) {
          const list = await answer.json();
          interval = list.interval * 1000;
          this.update(list, etag === null);
          etag = answer.headers.get("etag");
        }
        this.lastAnswer = Date.now() / 1000;
        this.onStatus("live", "");
        delay = interval;
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error.status === 401 || error.status === 403;
        this.onStatus(isRefused ? "refused" : "lost", error instanceof ServiceError ? error.message : "The metrics service does not answer.");
        if (isRefused) return this.stop();
        etag = null;
        delay = Math.min(Math.max(delay * 2, interval), MAX_DELAY);
      }
      await new Promise((resolve) => setTimeout(resolve, delay));
    }
  }

  update(list, isFirst) {
    const before = this.jobs;
    this.isRead = true;
    this.jobs = new Map(list.jobs.map((job) => [job.id, job]));
    this.isTruncated = list.truncated;
    const isSame = (id) => JSON.stringify(before.get(id)) === JSON.stringify(this.jobs.get(id));
    this.onJobs(this.jobs, isFirst ? null : new Set([...before.keys(), ...this.jobs.keys()].filter((id) => !isSame(id))));
  }
}
